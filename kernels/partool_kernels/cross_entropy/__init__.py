"""Cross entropy of logits, with z-loss and soft-capped logits; its gradient may take the place of the logits."""
