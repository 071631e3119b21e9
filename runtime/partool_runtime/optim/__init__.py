"""Optimizer, learning-rate schedules and the gradient norm; all work on this rank's shards."""
