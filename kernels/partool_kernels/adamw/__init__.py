"""AdamW on many tensors in one launch."""
