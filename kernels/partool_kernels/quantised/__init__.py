"""Frozen matrices that are stored in 4 or 8 bits, and products with them."""
