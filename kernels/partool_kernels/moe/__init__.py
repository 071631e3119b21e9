"""Tokens of a mixture of experts: copied to where their experts' rows lie together, and summed up again."""
