"""What one import may read: bytes, files, words, and the folders of sourced files; one object for all readers.

Files of other systems come from strangers. A short script can double a variable forty times, source itself, or name a
device that never ends; each such growth is charged here, and ends in an error that names the limit.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from partool.diagnostics.record import Diagnostic, Span

MAX_READ_BYTES = 512 * 2**10
"""Bytes of all files of one run; the largest of the 70 files in ``tests/data/corpus`` has 8 KiB."""
MAX_FILES = 64
MAX_WORDS = 10_000
"""Words and operators of all scripts of one run; the longest script in ``tests/data/corpus`` has 780."""
MAX_EXPANDED_BYTES = 4 * 2**20
"""Bytes of text that variables of scripts stand for, summed over their uses; 38 KiB is the most in that corpus."""
MAX_CALLS = 200
"""Functions of a module of configurations that are followed."""
_WORD_BYTES = 64
"""What a word costs besides its letters."""
_READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""Flags to open a file with; each operating system has some of them."""


class OverBudgetError(Exception):
    """An import would read more than its limits allow; ``finding`` names the limit."""

    def __init__(self, what: str, span: Span | None = None) -> None:
        super().__init__(what)
        fix = "give a script or a configuration of one run, with its values written out"
        self.finding = Diagnostic("PT829", f"an import ends here: {what}", help=fix, span=span)


class UnreadableFileError(Exception):
    """A file cannot be read; the text says why."""


@dataclass
class Budget:
    """What is left to one import."""

    read_bytes: int = MAX_READ_BYTES
    files: int = MAX_FILES
    words: int = MAX_WORDS
    expanded_bytes: int = MAX_EXPANDED_BYTES
    calls: int = MAX_CALLS
    source_folders: tuple[Path, ...] = ()
    """Folders besides that of the script from which sourced files may be read."""

    def read(self, path: Path) -> str:
        """Return the text of a regular file.

        Raises:
            UnreadableFileError: there is no such file, it is no text in UTF-8, or no regular file: reading a pipe or a
                device might never end.
            OverBudgetError: the files of this import are too large or too many.
        """
        try:
            # A pipe without a writer would block the opening of it.
            handle = os.open(path, _READ)
        except (OSError, ValueError) as error:
            raise UnreadableFileError(getattr(error, "strerror", None) or str(error)) from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise UnreadableFileError("it is not a regular file")
        with os.fdopen(handle, "rb") as file:
            self._open(path)
            try:
                data = file.read(self.read_bytes + 1)
            except OSError as error:
                raise UnreadableFileError(error.strerror or str(error)) from None
        self.take(path, len(data))
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UnreadableFileError("it is no text in UTF-8") from None

    def _open(self, path: Path) -> None:
        self.files -= 1
        if self.files < 0:
            raise OverBudgetError(f"its files name more than {MAX_FILES} others; the last is {path}")

    def take(self, path: Path, size_bytes: int) -> None:
        """Charge a file that is read."""
        self.read_bytes -= size_bytes
        if self.read_bytes < 0:
            raise OverBudgetError(
                f"its files have more than {MAX_READ_BYTES // 2**10} KiB together; the last is {path}"
            )

    def word(self, path: Path, line: int) -> None:
        """Charge a word or an operator of a script."""
        self.words -= 1
        if self.words < 0:
            raise OverBudgetError(f"its scripts have more than {MAX_WORDS:,} words", Span(str(path), line, 1, line, 1))

    def expand(self, size: int, path: Path, line: int, words: int = 0) -> None:
        """Charge text of ``size`` letters, in so many ``words``, that a variable of a script stands for."""
        self.expanded_bytes -= size + words * _WORD_BYTES
        if self.expanded_bytes < 0:
            what = f"variables of its scripts stand for more than {MAX_EXPANDED_BYTES // 2**20} MiB of text"
            raise OverBudgetError(what, Span(str(path), line, 1, line, 1))

    def call(self, path: Path, line: int) -> None:
        """Charge a function of a module of configurations that is followed."""
        self.calls -= 1
        if self.calls < 0:
            what = f"its functions take more than {MAX_CALLS} other configurations"
            raise OverBudgetError(what, Span(str(path), line, 1, line, 1))

    def allows(self, file: Path, root: Path) -> bool:
        """Return whether a sourced file lies in the folder ``root`` of the script, or in one that the user allows."""
        try:
            place = file.resolve()
            return any(place.is_relative_to(folder.resolve()) for folder in (root, *self.source_folders))
        except (OSError, ValueError, RuntimeError):  # a name that is no path, or links in a circle
            return False
