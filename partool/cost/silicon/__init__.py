"""Prices from measured kernels and collectives (:mod:`partool.catalog.silicon`)."""
