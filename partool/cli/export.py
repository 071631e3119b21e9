"""``partool export``."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import typer

from partool.cli._fail import fail
from partool.cli._runs import find_run_or_exit
from partool.plan.outline import outline
from partool.process import python_command
from partool.strategies.jobs import JOBS

_CONFIGURATION = 78
_ENVIRONMENT = 3


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")] = "last",
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must be empty or not exist.")],
    format: Annotated[Literal["hf"], typer.Option("--format", help="hf: safetensors and config.json.")] = "hf",
    step: Annotated[int | None, typer.Option("--step", min=0, help="Checkpoint; default the newest.")] = None,
    dtype: Annotated[
        Literal["fp64", "fp32", "bf16", "fp16"] | None,
        typer.Option("--dtype", help="Type of the weights; default the run's precision."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with an adapter: write the whole model with the adapter's sum.")
    ] = False,
) -> None:
    """Write the weights of a run as a folder that other tools load."""
    stored = find_run_or_exit(run)
    with contextlib.suppress(OSError, ValueError):  # said by the export, which reads the plan
        if not JOBS[outline(stored.plan_file).job].backward:
            fail("PT517", f"{stored.id} is an evaluation, which has no weights", "export the run that trained them", 1)
    for module in ("torch", "safetensors"):
        if importlib.util.find_spec(module) is None:
            fail(
                "PT501", f"export needs {module}, which is not installed", "pip install 'partool[train]'", _ENVIRONMENT
            )
    line = python_command("partool_runtime.export", str(stored.path), "--format", format, "--out", str(out))
    line += ["--step", str(step)] * (step is not None)
    line += ["--dtype", str(dtype)] * (dtype is not None)
    line += ["--force"] * force
    line += ["--merge"] * merge
    code = subprocess.run(line, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        raise typer.Exit(1 if code in (1, _CONFIGURATION) else _ENVIRONMENT)
