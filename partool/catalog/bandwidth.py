"""Shares of a device's memory bandwidth that kernels reach."""

from __future__ import annotations

MEMORY_SHARE = 0.85
"""Share of the memory bandwidth that products and copies reach where memory limits them: an assumption between two
measurements. Copies reach 0.90 on an H100 (``tests/bench/results/kernels_gpu.json``). Products in bf16 with 16 to 64
rows and at least 256 MiB of weights reach 0.77 in the median of nine NVIDIA devices (0.74 on A100 to 0.84 on H100;
10,004 rows of aiconfigurator's linear layers), and 0.73 on MI355X (75 of ROCm/aiter's tuned products). Devices with
tables do not depend on it inside the tables; elsewhere 0.77 would make products with few rows a tenth longer, and would
not change those that computation limits."""
STREAM_SHARE = {"cpu": 1.0, "cuda": 0.80, "rocm": 0.75}
"""Share of the memory bandwidth that element-wise kernels reach, by backend; for a CPU, the stated bandwidth is already
the rate that these kernels reach.

On an H100, 30 norms, activations and rotations of 50 us or longer reach 0.82 in the median, and 0.64 to 0.88 in the
quartiles (0.91 of a copy's rate, which is 0.90 of the bandwidth; ``tests/bench/results/kernels_gpu.json``). The scales
of fp8 inputs, read at a rate that is the difference of two kernels, reach 0.79 to 0.95 on six devices (15 rows each of
aiconfigurator). For ROCm the value is an assumption, as no element-wise kernel of an AMD device was published: MI355X's
products reach 0.73 where those of NVIDIA's devices reach 0.77 (:data:`MEMORY_SHARE`), and 0.80 in this proportion is
0.76. With 0.80 element-wise work on AMD devices would take 6 % less time."""
