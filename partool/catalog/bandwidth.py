"""Shares of a device's memory bandwidth that kernels reach."""

from __future__ import annotations

MEMORY_SHARE = 0.85
"""Share of the memory bandwidth that matrix products and copies reach where memory limits them."""
STREAM_SHARE = {"cpu": 1.0, "cuda": 0.80, "rocm": 0.75}
"""Share of the memory bandwidth that element-wise kernels reach, by backend; for a CPU, the stated bandwidth is already
the rate that these kernels reach."""
