"""Gradients as one bit per element and a scale per chunk, with error feedback."""
