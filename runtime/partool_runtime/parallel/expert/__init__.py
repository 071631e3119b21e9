"""Layers of experts on several ranks: which rank holds which experts, how tokens reach them, and their load."""
