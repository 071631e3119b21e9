"""Explanations in words of why a layout was taken and others were not."""
