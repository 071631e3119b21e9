"""Gated linear units: activation(gate) · up, and its backward pass from gate and up alone."""
