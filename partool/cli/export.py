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
    best: Annotated[bool, typer.Option("--best", help="The checkpoint of the best validation.")] = False,
    average: Annotated[
        int, typer.Option("--average", min=1, help="Mean of the weights of so many checkpoints, the newest.")
    ] = 1,
    ema: Annotated[bool, typer.Option("--ema", help="The moving average that the training kept.")] = False,
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
    if best and (step is not None or average > 1):
        raise typer.BadParameter("--best names a checkpoint: it goes with neither --step nor --average")
    if ema and average > 1:
        raise typer.BadParameter("--ema and --average each name an average: give one of them")
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
    line += ["--best"] * best + ["--ema"] * ema + ["--average", str(average)] * (average > 1)
    line += ["--force"] * force
    line += ["--merge"] * merge
    code = subprocess.run(line, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        raise typer.Exit(1 if code in (1, _CONFIGURATION) else _ENVIRONMENT)
