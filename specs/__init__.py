"""Example specs."""
