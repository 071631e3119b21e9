"""Search: enumerate the layouts that a spec leaves open, price them, find the best."""
