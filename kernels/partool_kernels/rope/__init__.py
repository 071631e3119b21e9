"""Rotary position embedding of queries or keys, optionally after a norm of each head, in one pass over memory."""
