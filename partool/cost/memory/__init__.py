"""Device and host memory of ranks."""
