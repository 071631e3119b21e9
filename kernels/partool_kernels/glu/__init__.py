"""Gated linear units, activation(gate) · up, whose backward pass saves only gate and up."""
