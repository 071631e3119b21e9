"""The spec: the YAML file that the user writes, and its loader."""

from partool.spec._overrides import without_value
from partool.spec.loader import Loaded, load, load_text
from partool.spec.spec import Spec

__all__ = ["Loaded", "Spec", "load", "load_text", "without_value"]
