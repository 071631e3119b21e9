"""Finds the command of a script that trains, and the files that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.engines.settings import Setting
from partool.engines.shell import ShellScript, Word, split

File = tuple[Path, str]
"""A file's path and its text."""
_LARGEST_BYTES = 4 * 2**20
_LEVELS = 4
"""Folders above a script in which files are looked for that it names: scripts often run from the project's root."""


@dataclass
class Gathered:
    """What files of one run say, before it is understood."""

    settings: dict[str, Setting] = field(default_factory=dict)
    deepspeed: dict[str, Setting] = field(default_factory=dict)
    """Keys of a DeepSpeed configuration that belongs to the run."""
    findings: list[Diagnostic] = field(default_factory=list)
    hardware: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Texts of the files that other files name, by path."""


def training_command(script: ShellScript, least: int = 3, marks: str = "") -> list[Word]:
    """Return the command with most arguments that begin with two dashes, if it has at least as many as ``least``.

    Commands that match the expression ``marks`` are preferred. A file of arguments alone is one command, whatever its
    lines; a command in quotes (``sh -c "..."``) is read, too.
    """
    commands = [[part for word in words for part in _parts(word)] for words in script.commands]
    if commands and all(words[0].text.startswith("--") for words in commands):
        commands = [[word for words in commands for word in words]]
    if marks and (named := [words for words in commands if re.search(marks, " ".join(each.text for each in words))]):
        commands, least = named, 0
    dashed = [(sum(word.text.startswith("--") for word in words), words) for words in commands]
    most, found = max(dashed, key=lambda each: each[0], default=(0, []))
    return found if most >= least else []


def _parts(word: Word) -> Sequence[Word]:
    return list(split(word)) if " --" in word.text else [word]


def span_of(word: Word) -> Span:
    """Return the line of a word."""
    return Span(word.file, word.line, 1, word.line, 1)


def unknown_value(name: str, word: Word, to: str = "") -> Diagnostic:
    """Return a finding: only running the script would tell an argument's value, whose path in the spec is ``to``."""
    message = f"--{name} is {word.unknown[0]}, which only running the script would tell"
    way_out = "set the variable in the script, or add --define NAME=VALUE"
    return Diagnostic("PT825", message, path=tuple(to.split(".")) if to else (), help=way_out, span=span_of(word))


def missing_sources(path: Path, script: ShellScript) -> list[Diagnostic]:
    """Return a finding for each file that a script sources and that cannot be read.

    Such files often set up the machine only; a value that they set and that matters is an error of its own.
    """
    way_out = "put the file beside the script if it sets values of the run, or write them into the script"
    return [
        Diagnostic(
            "PT825", f"{path} sources {each.text}, which cannot be read", "warning", help=way_out, span=span_of(each)
        )
        for each in script.missing
    ]  # fmt: skip


def named_file(name: str, beside: str, files: Sequence[File]) -> File | None:
    """Return a file that another one names: one of ``files``, or one on disk near the file that names it."""
    wanted = Path(name.strip("\"'"))
    for path, text in files:
        if path.name == wanted.name:
            return path, text
    place = Path(beside).parent
    for folder in (place, *list(place.absolute().parents)[:_LEVELS]):
        try:
            if (found := folder / wanted).is_file() and found.stat().st_size <= _LARGEST_BYTES:
                return found, found.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError):
            continue
    return None


def not_found(setting: Setting) -> Diagnostic:
    """Return a finding: a file that a setting names cannot be read."""
    message = f"{setting.name} names {setting.value}, which cannot be read here"
    return Diagnostic("PT825", message, help="give that file as another FILE", span=setting.span)


def launched(found: dict[str, Setting], gathered: Gathered, names: Mapping[str, str]) -> None:
    """Move the launcher's numbers of machines and devices from settings to ``gathered.hardware``."""
    for name, target in names.items():
        setting = found.get(name)
        if setting is None:
            continue
        if str(setting.value).isdigit():
            gathered.hardware[target] = int(setting.value)
            continue
        gathered.findings.append(
            Diagnostic(
                "PT822", f"{setting.name} is {setting.value}, and a number is needed", path=("hardware", target),
                span=setting.span, help=f"add --{target.replace('_', '-')} NUMBER",
            )
        )  # fmt: skip


def options(words: Sequence[Word]) -> Iterator[tuple[str, Any, Word, Word]]:
    """Yield name, value and the words of both for each option of a command; True is the value of a flag.

    What stands between a value and the next option is not yielded.
    """
    for place, word in enumerate(words):
        if not word.text.startswith("--"):
            continue
        name, sign, given = word.text[2:].partition("=")
        after = words[place + 1] if place + 1 < len(words) else word
        if sign:
            yield name, given, word, word
        elif after is not word and (not after.text.startswith("-") or re.match(r"-\d", after.text)):
            yield name, after.text, word, after
        else:
            yield name, True, word, word
