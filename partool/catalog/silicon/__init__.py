"""Times of kernels and collectives that others measured on devices, distilled into grids."""
