"""Explanations in words of why a layout was taken and why other layouts were not."""
