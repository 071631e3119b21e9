"""Runs that others measured, read from a table and predicted row by row."""
