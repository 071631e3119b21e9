"""Which layouts a spec leaves open, what they cost, and the best of them."""
