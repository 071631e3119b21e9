"""Output matrix and cross entropy in one: chunks of rows, whose logits never all exist at once."""
