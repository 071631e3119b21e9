"""Measurement of the fastest configurations of partool's kernels on this GPU, written into tables."""
