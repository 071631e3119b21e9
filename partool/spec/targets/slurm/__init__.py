"""Slurm's section of a spec, and its rules."""
