"""Output to the terminal: partool's texts, reports, and output of the ranks.

Texts of a spec, a file or a scheduler may contain control characters. On a terminal they are displayed, not executed;
output to a file or a pipe is unchanged.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from partool.diagnostics.secrets import masked
from partool.diagnostics.text import visible

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["of_ranks", "one_stream", "open_console", "say", "tame", "visible"]

_STEERING = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"  # SGR, of which only the last colour is kept
    r"|\x1b[PX^_\]][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # DCS, SOS, PM, APC, OSC with their contents
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"  # CSI: cursor, erasing, modes, reports
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\udc80-\udc9f]"  # other C0 and C1, in UTF-8 or as single bytes
)
"""Control functions of ECMA-48; an unterminated string extends to the end of its line."""


def say(text: str, *, err: bool = False, nl: bool = True, painted: bool = False) -> None:
    """Print a text: results on standard output, other messages (``err``) on standard error, with secrets masked.

    ``painted`` means that partool made the control characters in ``text``. Raises BrokenPipeError if standard output is
    closed; a closed standard error does not change the command's result.
    """
    stream = sys.stderr if err else sys.stdout
    if err:
        text = masked(text)
    if not painted and stream.isatty():
        text = visible(text)
    try:
        stream.write(text + "\n" * nl)
        stream.flush()
    except BrokenPipeError:
        if not err:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python would complain when it flushes at exit


def one_stream() -> bool:
    """Return True if standard output and standard error go to one place, such as a terminal or the same file."""
    try:
        places = [os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr)]
    except (OSError, ValueError, AttributeError):  # a stream of another kind, or none
        return False
    return (places[0].st_dev, places[0].st_ino) == (places[1].st_dev, places[1].st_ino)


def of_ranks(text: bytes, stream: TextIO) -> bytes:
    """Return the output of ranks in the form that may go to a stream.

    A terminal gets colours, line ends and carriage returns; control functions that move its cursor, erase, or set its
    title are left out. A file or a pipe gets everything.
    """
    return tame(text) if stream.isatty() else text


def tame(text: bytes) -> bytes:
    """Return the text without control functions other than colours, line ends, tabs and carriage returns."""
    kept = _STEERING.sub(lambda match: match["colour"] or "", text.decode("utf-8", "surrogateescape"))
    return kept.encode("utf-8", "surrogateescape")


def open_console(**options: Any) -> Console:
    """Return rich's console, set to display control characters in its input and to interpret no markup."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Tame(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control or segment.text.isprintable():
                    yield segment
                else:
                    yield Segment(visible(segment.text), segment.style)

    return Tame(markup=False, emoji=False, **options)
