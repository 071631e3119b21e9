"""Prices of sequence parallelism: one module per method, named after the method."""
