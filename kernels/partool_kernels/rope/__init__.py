"""Rotary position embedding of queries or keys, with the norm of each head before it, in one pass."""
