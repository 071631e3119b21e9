"""Output matrix and cross entropy in one operator, which holds the logits of only one chunk of rows at a time."""
