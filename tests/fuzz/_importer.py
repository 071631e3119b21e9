"""A process of its own that imports the files of the cases that it is told, one by one, within limits.

Each line of its input has the name of an attack and a case; each line of its output has what is wrong with the case, or
nothing. The process is ended from outside where a case does not end.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
from pathlib import Path

import typer
from _attack import SEED
from _configurations import EIGHT, LENGTH, bombs, mutated
from _limits import bounded
from typer.testing import CliRunner

from partool.cli.import_ import command
from partool.spec.loader import load_text

CPU_S = 10.0
MEMORY_GIB = 1.0


def case_of(name: str, case: str) -> tuple[str, str, list[str]]:
    """Return the name of a case's file, its text, and options of the command."""
    if name == "bombs":
        file, text = bombs()[case]
        options = ["--accelerator", "h100-sxm"] if file.endswith(".sh") else [*EIGHT, *LENGTH]
        return file, text, [*options, "--define", "CONFIG=f0"] if file.endswith(".py") else options
    return mutated(random.Random(f"{SEED}:{name}:{case}"))


def attempt(app: typer.Typer, name: str, case: str) -> str:
    """Import a case; return what is wrong with it, or nothing."""
    file, text, options = case_of(name, case)
    Path(file).write_text(text, encoding="utf-8", errors="surrogateescape")
    try:
        with bounded(CPU_S, MEMORY_GIB):
            result = CliRunner().invoke(app, [file, *options], catch_exceptions=False)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    said = result.stderr[-300:]
    if result.exit_code == 0:
        wrong = [each.message for each in load_text(result.stdout).diagnostics if each.severity == "error"]
        return f"a spec is written that is wrong: {wrong}" if wrong else ""
    if result.exit_code not in (1, 2):
        return f"exit code {result.exit_code}: {said}"
    if result.stdout:
        return f"an error, and a spec: {said}"
    return "" if "error[PT" in result.stderr else f"an error without a code: {said}"


def main() -> None:
    """Answer cases until the input ends."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    most = 3 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ("pipe.sh", "pipe.yaml"):
            os.mkfifo(name)
        Path("link.sh").symlink_to("/dev/zero")
        for line in sys.stdin:
            name, case = json.loads(line)
            print(json.dumps(attempt(app, name, case)), flush=True)


if __name__ == "__main__":
    main()
