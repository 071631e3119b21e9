"""Tensor parallelism: which rank multiplies which part of a matrix, and what the ranks send each other."""
