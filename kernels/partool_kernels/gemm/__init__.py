"""Products of matrices in Triton, for shapes where a tuned kernel is faster than the vendor's library."""
