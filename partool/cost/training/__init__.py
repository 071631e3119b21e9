"""Prices of training: its steps, its state and the exchange of gradients."""
