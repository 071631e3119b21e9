"""The commands of partool's command line, one module per command."""

INTERRUPTED = 130
"""Exit code of an interrupted command, as shells use it: 128 plus the number of SIGINT."""
INTERRUPTED_MESSAGE = "partool: interrupted\n"
