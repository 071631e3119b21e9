"""Tensor parallelism: the parts of matrices that each rank multiplies, and the exchanges between the ranks."""
