"""Builds the command lines with which partool starts Python processes."""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command line that runs a module; ``python`` is the interpreter, by default this process's.

    ``-P`` keeps the current folder off the module path, so that planning a spec in a downloaded folder never runs that
    folder's ``torch.py``. ``-I`` is not used: it would also ignore PYTHONPATH, through which the environment modules of
    HPC sites provide packages.
    """
    return [python or sys.executable, "-P", "-m", module, *arguments]


def interpreter() -> str:
    """Return the path of this process's Python interpreter, for messages and scripts."""
    return sys.executable
