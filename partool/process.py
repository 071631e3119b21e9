"""How a Python process is started: said here, and nowhere else."""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command line that runs a module; ``python`` is the interpreter, by default this process's own.

    With ``-P``, a file in the current folder cannot pass for a module of the same name: who plans a spec in a strange
    folder does not run that folder's ``torch.py``. Not with ``-I``, which would also ignore PYTHONPATH, by which the
    modules of HPC sites bring their packages.
    """
    return [python or sys.executable, "-P", "-m", module, *arguments]


def interpreter() -> str:
    """Return this process's interpreter, for messages and scripts; :func:`python_command` starts it."""
    return sys.executable
