"""What ranks keep in device and host memory."""
