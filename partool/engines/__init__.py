"""Other training systems: their settings are read into specs, and their plans are priced with their own constants."""

from partool.engines.read import Engine, Imported, Wanted, engine_of, read

__all__ = ["Engine", "Imported", "Wanted", "engine_of", "read"]
