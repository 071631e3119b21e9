"""Cross entropy of logits, with z-loss and soft-capped logits; its gradient may overwrite the logits."""
