"""Conversion of matrices to 8 bits with one scale per block, and linear maps that multiply 8-bit matrices."""
