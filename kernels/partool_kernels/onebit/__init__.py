"""Gradients as one bit per element and a scale per chunk, with what is lost kept for the next time."""
