"""Runs that Slurm starts."""
