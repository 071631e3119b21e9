"""Prices of the methods of sequence parallelism, one module per method of its name."""
