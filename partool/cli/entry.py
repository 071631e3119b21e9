"""Entry point of the script ``partool``: it loads the command line so that Ctrl-C never ends with a traceback.

While modules load, an interrupt must not be an exception: code that is imported may catch it or turn it into another
one (``__set_name__`` makes it a RuntimeError). So the process ends within the signal's handler.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

from partool.cli import INTERRUPTED, INTERRUPTED_MESSAGE


def run() -> None:
    """Load the command line and run the command of ``sys.argv``; exits with the command's code."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:  # not where interrupts are ignored, as in a shell's background jobs
        signal.signal(signal.SIGINT, _end)
    from partool.cli.main import run as run_command

    run_command(loaded=_end_no_more if usual else None)


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    os.write(2, INTERRUPTED_MESSAGE.encode())
    os._exit(INTERRUPTED)


def _end_no_more() -> None:
    """Make interrupts exceptions again: a command may have work to undo."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
