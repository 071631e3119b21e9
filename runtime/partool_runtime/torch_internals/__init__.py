"""The one place that touches private names of torch, each with the reason and the public way that is missing."""
