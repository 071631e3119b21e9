"""Attention over sequences whose tokens are spread over ranks: one method per file."""
