"""Rendering of a plan as the text that a cluster runs: pure functions, one module per target."""
