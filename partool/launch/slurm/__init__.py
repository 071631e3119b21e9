"""Launching runs under Slurm."""
