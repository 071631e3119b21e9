"""Prices of jobs whose passes only go forward, where they differ from those of training."""
