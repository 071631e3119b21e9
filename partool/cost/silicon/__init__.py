"""Prices that come from measured kernels (:mod:`partool.catalog.silicon`)."""
