"""Profiles of a run: the request for one, and the files in which ranks leave their traces.

``profile/request.json`` in a run's folder asks a running job for a profile. Rank 0 removes it once all ranks agree on
the steps. Each profiled rank writes ``profile/steps-A-B/rank-R.json.gz``, a trace in Chrome's format.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from partool.plan.record import Record, parse_json

FOLDER = "profile"
REQUEST_FILE = "request.json"
MOST_STEPS = 1000
_TRACE = re.compile(r"rank-(\d+)\.json\.gz")
_STEPS = re.compile(r"steps-(\d+)-(\d+)")


class ProfileRequest(Record):
    """Which ranks of a running job to profile, and for how many steps."""

    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 2
    first_rank: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    last_rank: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    memory: bool = False
    """Whether ranks also write a snapshot of the memory of their GPU."""


def request_file(run_dir: Path) -> Path:
    """Return the path of the request for a profile."""
    return run_dir / FOLDER / REQUEST_FILE


def write_request(run_dir: Path, request: ProfileRequest) -> None:
    """Ask the run in ``run_dir`` for a profile; a reader sees the whole request or none. Raises OSError."""
    file = request_file(run_dir)
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(request.model_dump_json() + "\n", encoding="utf-8")
    temporary.replace(file)


def take_request(run_dir: Path) -> ProfileRequest | None:
    """Return the request in ``run_dir`` and remove it; None if there is none. Raises ValueError if it is damaged."""
    file = request_file(run_dir)
    try:
        text = file.read_bytes()
    except OSError:
        return None
    file.unlink(missing_ok=True)
    return ProfileRequest.model_validate(parse_json(text))


def folder_of(run_dir: Path, first: int, last: int) -> Path:
    """Return the folder of the traces of steps ``first`` to ``last``, counted from 1."""
    return run_dir / FOLDER / f"steps-{first}-{last}"


def trace_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace in a folder of traces."""
    return folder / f"rank-{rank}.json.gz"


def snapshot_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's snapshot of GPU memory, for https://pytorch.org/memory_viz."""
    return folder / f"memory-rank-{rank}.pickle"


def out_of_memory_file(run_dir: Path, rank: int) -> Path:
    """Return the path of the snapshot that a rank writes when the memory of its GPU is full."""
    return run_dir / FOLDER / f"out-of-memory-rank-{rank}.pickle"


def traces(run_dir: Path) -> list[tuple[tuple[int, int], int, Path]]:
    """Return ((first step, last step), rank, path) of each trace of a run, by steps and rank."""
    listed = []
    for path in (run_dir / FOLDER).glob("steps-*/rank-*.json.gz"):
        steps, rank = _STEPS.fullmatch(path.parent.name), _TRACE.fullmatch(path.name)
        if steps and rank:
            listed.append(((int(steps[1]), int(steps[2])), int(rank[1]), path))
    return sorted(listed)
