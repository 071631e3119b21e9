"""Which kernels and configurations a layout's products and parts get."""
