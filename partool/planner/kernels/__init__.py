"""Kernels and configurations for a layout's matrix products and fused parts."""
