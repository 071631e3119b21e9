"""What layouts may be: the values that each choice can have, and in words why others cannot."""
