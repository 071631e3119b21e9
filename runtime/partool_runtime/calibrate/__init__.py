"""Measuring this machine: ``python -m partool_runtime.calibrate``. No other module imports it."""
