"""Output of commands in README.md and docs, made by the commands: ``make samples`` writes every block anew.

A block is a fence after a line such as ``<!-- sample: partool plan specs/quickstart.yaml -->``. The command runs on the
fixed planning machine of ``_golden.py``, at 80 columns, in a folder with the repository's ``specs`` and with the page's
own files, which are the fences after ``<!-- file: mine.yaml -->``. Behind ``::`` a marker may say what is shown:

* ``FROM .. TO``: the lines from the first that begins with FROM, up to the one before the next that begins with TO
  (to the end if TO is empty); several such parts are joined by ``;``.
* ``/PATTERN/``: the lines in which a regular expression is found, with ``...`` for lines left out between them.

``sample`` blocks take a second or less and are compared each time, ``slow sample`` blocks in the long suite.
``recorded sample`` blocks train: ``make samples RECORDED=1`` runs their commands on the machine as it is.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from _golden import fixed_machine

from partool.cli.main import run

ROOT = Path(__file__).parents[2]
KINDS = ("sample", "slow sample", "recorded sample")
_MARKED = re.compile(
    r"^<!-- (?P<kind>(?:slow |recorded )?sample|file): (?P<text>.*?) -->\n```\w*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Sample:
    """A marked block of a page."""

    page: Path
    kind: str
    command: str
    shown: str
    """What of the output is shown; empty for all."""
    body: str
    start: int
    """Place of the body in the page's text."""


def pages() -> list[Path]:
    """Return the pages that may have samples."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def samples(page: Path) -> Iterator[Sample]:
    """Yield the marked blocks of a page that show output."""
    for match in _MARKED.finditer(page.read_text(encoding="utf-8")):
        if match["kind"] != "file":
            command, _, shown = match["text"].partition(" :: ")
            yield Sample(page, match["kind"], command.strip(), shown.strip(), match["body"], match.start("body"))


def files_of(page: Path) -> tuple[tuple[str, str], ...]:
    """Return (name, text) of the files that a page shows."""
    found = _MARKED.finditer(page.read_text(encoding="utf-8"))
    return tuple((match["text"], match["body"]) for match in found if match["kind"] == "file")


def made(sample: Sample) -> str:
    """Return the block that the sample's command gives now."""
    output = (recorded if sample.kind == "recorded sample" else printed)(sample.command, files_of(sample.page))
    return excerpt(output, sample.shown)


@cache
def printed(command: str, files: tuple[tuple[str, str], ...]) -> str:
    """Return what a command prints on the fixed planning machine; with ``2>&1`` at its end also its messages."""
    words = shlex.split(command)
    both = words[-1] == "2>&1"
    out, err = io.StringIO(), io.StringIO()
    with _folder(files) as folder, chdir(folder), fixed_machine(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        with redirect_stdout(out), redirect_stderr(out if both else err):
            try:
                run(words[1:-1] if both else words[1:])
            except SystemExit:
                pass
    return out.getvalue()


@cache
def recorded(command: str, files: tuple[tuple[str, str], ...]) -> str:
    """Return what a command prints on this machine; all commands share one folder of runs."""
    variables = os.environ | {"COLUMNS": "80", "PARTOOL_HOME": str(ROOT / ".partool"), "PYTHONUNBUFFERED": "1"}
    with _folder(files) as folder:
        command = re.sub(r"^partool", f"{shlex.quote(sys.executable)} -m partool", command)
        done = subprocess.run(
            command, shell=True, cwd=folder, env=variables, capture_output=True, text=True, check=True
        )
    return done.stdout.replace(f"{ROOT}/", "")


def _folder(files: tuple[tuple[str, str], ...]) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="samples")
    (Path(folder.name) / "specs").symlink_to(ROOT / "specs")
    for name, text in files:
        (Path(folder.name) / name).write_text(text, encoding="utf-8")
    return folder


def excerpt(output: str, shown: str) -> str:
    """Return the part of a command's output that a marker asks for; raises ValueError if it is not there."""
    lines = [line.rstrip() for line in output.splitlines()]
    if pattern := re.fullmatch(r"/(.*)/", shown):
        lines = _matching(lines, re.compile(pattern[1]))
    elif shown:
        lines = [line for part in shown.split(";") for line in _between(lines, part)]
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise ValueError(f"nothing is shown by {shown!r}")
    return "\n".join(lines) + "\n"


def _between(lines: list[str], part: str) -> list[str]:
    first, _, last = (text.strip() for text in part.partition(".."))
    start = next((at for at, line in enumerate(lines) if line.lstrip().startswith(first)), None)
    if start is None:
        raise ValueError(f"no line begins with {first!r}")
    stop = next((at for at in range(start + 1, len(lines)) if last and lines[at].lstrip().startswith(last)), len(lines))
    return lines[start:stop]


def _matching(lines: list[str], pattern: re.Pattern[str]) -> list[str]:
    found: list[str] = []
    for line in lines:
        if pattern.search(line):
            found.append(line)
        elif found and found[-1] != "...":
            found.append("...")
    return found[:-1] if found and found[-1] == "..." else found


def rewrite(page: Path, kinds: tuple[str, ...]) -> bool:
    """Write a page's blocks of some kinds anew; returns whether the page changed."""
    text = page.read_text(encoding="utf-8")
    for sample in sorted(samples(page), key=lambda sample: -sample.start):
        if sample.kind in kinds:
            text = text[: sample.start] + made(sample) + text[sample.start + len(sample.body) :]
    changed = text != page.read_text(encoding="utf-8")
    if changed:
        page.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    wanted = KINDS if os.environ.get("RECORDED") else KINDS[:2]
    for each in pages():
        if rewrite(each, wanted):
            print(f"wrote {each.relative_to(ROOT)}")
