"""Finds the command of a script that trains, and the files that it names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.engines import slurm
from partool.engines.budget import Budget, UnreadableFileError
from partool.engines.machines import Machines
from partool.engines.settings import Setting
from partool.engines.shell import ShellScript, Word, split

File = tuple[Path, str]
"""A file's path and its text."""
_LEVELS = 4
"""Folders above a script in which files are looked for that it names: scripts often run from the project's root."""


@dataclass
class Gathered:
    """What files of one run say, before it is understood."""

    budget: Budget = field(default_factory=Budget)
    settings: dict[str, Setting] = field(default_factory=dict)
    deepspeed: dict[str, Setting] = field(default_factory=dict)
    """Keys of a DeepSpeed configuration that belongs to the run."""
    findings: list[Diagnostic] = field(default_factory=list)
    machines: Machines = field(default_factory=Machines)
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
    most, longest = max(dashed, key=lambda each: each[0], default=(0, []))
    return longest if most >= least else []


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


def script_of(path: Path, text: str, budget: Budget) -> tuple[ShellScript, list[Diagnostic]]:
    """Return a script that is read with the variables that Slurm sets, and findings about files that it sources."""
    script = ShellScript(budget)
    script.variables |= {name: [Word(value, str(path), 1)] for name, value in slurm.variables(text).items()}
    script.read(path, text)
    return script, _sources(path, script)


def _sources(path: Path, script: ShellScript) -> list[Diagnostic]:
    """Return a finding for each file that a script sources and that is not read.

    Such files often set up the machine only; a value that they set and that matters is an error of its own.
    """
    findings = list[Diagnostic]()
    for each in dict.fromkeys(script.missing):
        message = f"{path} sources {each.text}, which cannot be read"
        help = "put the file beside the script if it sets values of the run, or write them into the script"
        findings.append(Diagnostic("PT825", message, "warning", help=help, span=span_of(each)))
    for each in dict.fromkeys(script.outside):
        message = f"{path} sources {each.text}, which lies outside of the script's folder and is not read"
        folder = shlex.quote(str((Path(each.file).parent / each.text).parent))
        help = f"if it sets values of the run: partool import --source-folder {folder}, or write them into the script"
        findings.append(Diagnostic("PT825", message, "warning", help=help, span=span_of(each)))
    return findings


def named_file(name: str, beside: str, files: Sequence[File], budget: Budget) -> File | None:
    """Return a file that another one names: one of ``files``, or one on disk near the file that names it."""
    wanted = Path(name.strip("\"'"))
    for path, text in files:
        if path.name == wanted.name:
            return path, text
    place = Path(beside).parent
    for folder in (place, *list(place.absolute().parents)[:_LEVELS]):
        try:
            return folder / wanted, budget.read(folder / wanted)
        except UnreadableFileError:
            continue
    return None


def not_found(setting: Setting) -> Diagnostic:
    """Return a finding: a file that a setting names cannot be read."""
    message = f"{setting.name} names {setting.value}, which cannot be read here"
    return Diagnostic("PT825", message, help="give that file as another FILE", span=setting.span)


_LAUNCHERS = re.compile(r"(^|/)torchrun$|torch\.distributed\.(run|launch)\b")


def launcher_without_nodes(command: Sequence[Word]) -> Word | None:
    """Return torchrun, or its module, if a command starts it without a number of nodes: that is one node.

    None where options before the program are left to a variable that nobody knows.
    """
    start = next((place for place, word in enumerate(command) if _LAUNCHERS.search(word.text)), -1)
    if start < 0:
        return None
    for place in range(start + 1, len(command)):
        word, before = command[place], command[place - 1].text
        if word.text.partition("=")[0].replace("_", "-") == "--nnodes":
            return None
        if word.text.endswith(".py") or before.lstrip("-") in ("m", "module"):
            break
        if word.unknown and not word.text.startswith("-") and ("=" in before or not before.startswith("-")):
            return None
    return command[start]


def default_nodes(machines: Machines, launcher: Word | None) -> None:
    """Take in that a launcher starts one node where its options name no number of nodes."""
    if launcher is not None:
        what = f"the number of nodes of {launcher.text} without --nnodes"
        machines.default("nodes", 1, what, span_of(launcher))


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
