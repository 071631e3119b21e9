"""Writes the output of commands to the terminal, a pipe or files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from partool.cli._fail import fail
from partool.plan.terminal import open_console, say

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def printing() -> Iterator[Console]:
    """Yield a console for printing; if standard output is no terminal, blanks at the ends of lines are removed."""
    console = open_console()
    if console.is_terminal:
        yield console
        return
    with console.capture() as captured:
        yield console
    say("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()), nl=False)


def write_or_exit(text: str, path: Path) -> None:
    """Write a file atomically: a reader sees the old file or the new one. Ends the command if writing fails.

    Devices and pipes (``/dev/null``) are written to, and never replaced by a file.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        fail("PT002", f"{path} cannot be written: {error.strerror}", "choose another file", 3)
