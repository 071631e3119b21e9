"""Parser of batch scripts: the options of the header, and the commands after it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_SHORT = {
    "a": "array", "A": "account", "c": "cpus-per-task", "C": "constraint", "D": "chdir", "e": "error", "G": "gpus",
    "J": "job-name", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos",
    "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_FLAGS = {"exclusive", "requeue", "no-requeue", "contiguous", "hold", "overcommit", "spread-job", "use-min-nodes"}
"""Long options that take no value."""
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(?:'(\w+)'|\"(\w+)\"|\\?(\w+))")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the header; ``name`` is its long name without dashes."""

    line: int
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Command:
    """One command after the header, without comments; continuation lines and quoted line ends are joined."""

    line: int
    text: str
    expanded: str
    """The part of the line that the batch shell expands: without text in single quotes or after a backslash."""


@dataclass(frozen=True, slots=True)
class Script:
    """A parsed script; lines count from 1."""

    lines: tuple[str, ...]
    header_end: int
    """Number of lines before the first command."""
    options: tuple[Option, ...]
    commands: tuple[Command, ...]
    inner: frozenset[int]
    """Numbers of lines that continue a command or a heredoc."""
    crlf: int
    """Number of the first line that ends in CR LF; 0 if there is none."""

    def find(self, *names: str) -> list[Option]:
        """Return the header's options with these names, in the order of the script."""
        return [option for option in self.options if option.name in names]

    def value(self, name: str) -> str | None:
        """Return the value that Slurm uses for an option: the last value given."""
        options = self.find(name)
        return options[-1].value if options else None

    @property
    def most_nodes(self) -> int:
        """Return the largest number of nodes that the header requests; 1 if it requests none."""
        match = re.fullmatch(r"(?:\d+-)?(\d+)", self.value("nodes") or "")
        return int(match[1]) if match else 1


def parse(text: str) -> Script:
    """Parse a script; text that cannot be parsed is skipped without an error."""
    raw = text.split("\n")
    crlf = next((number for number, line in enumerate(raw, 1) if line.endswith("\r")), 0)
    lines = tuple(line.removesuffix("\r") for line in raw)
    end = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines))
    header = [(number, line) for number, line in enumerate(lines[:end], 1) if line.startswith("#SBATCH")]
    options = tuple(option for number, line in header for option in _options(number, line.removeprefix("#SBATCH")))
    commands, inner = _commands(lines[end:], end + 1)
    return Script(lines, end, options, tuple(commands), frozenset(inner), crlf)


def options_of(words: list[str], line: int = 0) -> list[Option]:
    """Return the options among the words of a command or of a header line, up to the first word that is no option."""
    options: list[Option] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--"):
            name, value = _SHORT.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
            equals = value
        if not equals and name not in _FLAGS and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        options.append(Option(line, name, value))
    return options


def words_of(text: str) -> list[str]:
    """Return the words of a command as a shell splits them; unbalanced quotes are treated as plain characters."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _options(number: int, text: str) -> list[Option]:
    return options_of(words_of(text), number)


def _commands(lines: tuple[str, ...], first: int) -> tuple[list[Command], set[int]]:
    commands: list[Command] = []
    inner: set[int] = set()
    index = 0
    while index < len(lines):
        start = index
        reader = _Reader()
        while index < len(lines):
            going_on = reader.feed(lines[index])
            index += 1
            if not going_on:
                break
        text, expanded = "".join(reader.text), "".join(reader.expanded)
        if text.strip():
            commands.append(Command(first + start, text, expanded))
        for match in _HEREDOC.finditer(text.replace("<<<", "   ")):
            index = _after_heredoc(lines, index, next(word for word in match.groups() if word))
        inner.update(range(first + start + 1, first + index))
    return commands, inner


def _after_heredoc(lines: tuple[str, ...], index: int, marker: str) -> int:
    while index < len(lines) and lines[index].strip() != marker:
        index += 1
    return min(index + 1, len(lines))


class _Reader:
    """Joins the lines of one command of the script."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.expanded: list[str] = []
        self._quote = ""

    def feed(self, line: str) -> bool:
        """Add a line of the script; returns True if the command continues on the next line."""
        position = 0
        while position < len(line):
            char = line[position]
            if char == "\\" and self._quote != "'":
                if position + 1 == len(line):
                    self._put("\n", "\n")
                    return True
                self._put(line[position : position + 2], "  ")
                position += 2
                continue
            if char == "#" and not self._quote and (position == 0 or line[position - 1] in " \t;"):
                break
            if char in "'\"" and self._quote in ("", char):
                self._quote = "" if self._quote else char
            self._put(char, " " if self._quote == "'" else char)
            position += 1
        if self._quote:
            self._put("\n", "\n")
        return bool(self._quote)

    def _put(self, text: str, expanded: str) -> None:
        self.text.append(text)
        self.expanded.append(expanded)
