"""Prices of the methods of sequence parallelism, one module per method, with the method's name."""
