"""Messages that ranks send, and their bytes."""
