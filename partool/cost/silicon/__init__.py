"""Prices from tables of measured kernels and collectives (:mod:`partool.catalog.silicon`)."""
