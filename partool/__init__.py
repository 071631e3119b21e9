"""partool: plan, launch and run distributed training from one YAML file. Importing it never imports torch."""

from partool.version import __version__

__all__ = ["__version__"]
