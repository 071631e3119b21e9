"""Cross entropy of logits, with z-loss and soft-capped logits; the gradient may overwrite the logits."""
