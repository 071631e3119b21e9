"""A terminal that keeps all output written to it."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest

from partool.cli.main import run
from partool.diagnostics.text import steers

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.TextIOWrapper):
    """Standard output and error of a command that takes them for a terminal."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        return self.bytes.getvalue().decode("utf-8", "replace")


def on_a_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Run a command; return the terminal's output and the exit code."""
    monkeypatch.setitem(os.environ, "TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    with redirect_stdout(terminal), redirect_stderr(terminal):
        try:
            run(words)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return terminal.text, code


def obeyed(text: str) -> list[str]:
    """Return the lines with control characters that a terminal would obey, partool's own colours excepted."""
    return [line for line in _COLOUR.sub("", text).split("\n") if any(map(steers, line))]
