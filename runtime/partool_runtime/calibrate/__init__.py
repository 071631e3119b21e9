"""Measurement of this machine by ``python -m partool_runtime.calibrate``. No other package imports this package."""
