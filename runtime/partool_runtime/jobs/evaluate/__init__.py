"""Evaluation: the mean loss of a model over data, without gradients."""
