"""Launching runs on Kubernetes."""
