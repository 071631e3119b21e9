"""The Kubernetes section of a spec, and its rules."""
