"""Which messages ranks send, and how many bytes."""
