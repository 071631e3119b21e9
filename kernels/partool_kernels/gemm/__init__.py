"""Products of matrices in Triton, for shapes where a tuned one beats the vendor's."""
