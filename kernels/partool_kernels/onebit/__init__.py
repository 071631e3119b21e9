"""Compression of gradients to one bit per element and a scale per chunk, with error feedback."""
