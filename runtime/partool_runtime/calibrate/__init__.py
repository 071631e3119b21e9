"""Measuring this machine: ``python -m partool_runtime.calibrate``. Imported by nothing else."""
