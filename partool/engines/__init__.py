"""Other training systems: their settings are read into specs, and their plans are priced with their own constants."""

from partool.engines.kinds import engine_of, engine_of_all, kind_of
from partool.engines.read import Imported, Wanted, read, read_files
from partool.strategies.engines import Engine

__all__ = ["Engine", "Imported", "Wanted", "engine_of", "engine_of_all", "kind_of", "read", "read_files"]
