"""Findings about the layout that the search found, and about the whole plan."""
