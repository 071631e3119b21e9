"""Captures a model's forward pass as a graph, and rewrites the graph so that ranks share sequences (AutoSP)."""
