"""Dry runs: a rank's real code for its target device, without device, weights or other ranks.

Tensors are fake (shapes, types and devices without memory), collectives return at once, and a small library stands in
for CUDA. Kernels, NCCL, the timing of streams, generated code and the workspaces of libraries do not run.
"""
