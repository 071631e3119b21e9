"""Products of two 8-bit matrices with one scale per block of the inner width."""
