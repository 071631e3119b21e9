"""Products of two 8-bit matrices whose numbers have one scale per block of the inner width."""
