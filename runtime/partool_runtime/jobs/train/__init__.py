"""Training: the loop, its steps, and when to save what."""
