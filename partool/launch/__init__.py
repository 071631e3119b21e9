"""Launching and observing runs on this machine, Slurm and Kubernetes; see docs/design/architecture.md."""
