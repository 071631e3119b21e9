"""Measures which configurations of partool's kernels are fastest on this GPU, and writes them into tables."""
