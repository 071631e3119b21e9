"""Search: enumerate the layouts that a spec allows, price them, and find the best layout."""
