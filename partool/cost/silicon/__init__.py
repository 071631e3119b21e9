"""Prices from tables of measured kernels (:mod:`partool.catalog.silicon`)."""
