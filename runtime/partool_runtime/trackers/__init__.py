"""Trackers of experiments, each in a process of its own that follows the event log of rank 0; needs no torch."""
