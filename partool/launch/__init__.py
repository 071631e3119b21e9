"""Launching and observing runs on this machine, Slurm and Kubernetes; see docs/architecture.md."""
