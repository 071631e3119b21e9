"""``python -m partool``."""

from partool.cli.main import run

run()
