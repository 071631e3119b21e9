"""Seconds of passes, messages and updates."""
