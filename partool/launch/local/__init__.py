"""Launching runs on this machine."""
