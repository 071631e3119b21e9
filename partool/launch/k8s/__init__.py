"""Runs that Kubernetes starts."""
