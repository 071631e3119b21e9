"""The commands of partool's command line, one module per command."""
