"""The version of partool; the package's metadata and plans take it from here."""

__version__ = "0.2.0"
