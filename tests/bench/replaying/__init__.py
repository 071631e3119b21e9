"""Published runs predicted row by row."""
