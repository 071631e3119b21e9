"""What passes, messages and updates take."""
