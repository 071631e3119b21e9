"""Runs the command line of partool for ``python -m partool``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder: modules next to a spec must not be imported

from partool.cli.entry import run

run()
