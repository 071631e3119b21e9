"""Gated linear units, activation(gate) · up; their backward pass needs only gate and up."""
