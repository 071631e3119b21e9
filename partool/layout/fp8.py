"""Which linear layers ``precision: fp8`` computes in 8 bits: those inside of blocks whose widths matrix units take."""

from __future__ import annotations

MULTIPLE = 16
"""Of the widths of a matrix, as a rank holds it: rows of 16 bytes (CUTLASS, cuBLAS; AMD's units take 16 or 32 at a
time). Layers of other widths stay in bf16."""
