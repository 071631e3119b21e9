"""Compiled kernels; knows neither Spec nor Plan."""
