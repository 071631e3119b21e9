"""Output matrix and cross entropy in one operator, in chunks of rows: all logits never exist at once."""
