"""partool: plan, launch and run distributed training from one YAML file. Importing it never imports torch."""

__version__ = "0.1.0"
