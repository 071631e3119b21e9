"""Finds the checkpoints of a run by the names of their folders; only the runtime reads the checkpoints' contents."""

from __future__ import annotations

import os
import re
from pathlib import Path

from partool.launch.store import Run
from partool.plan.types import Plan
from partool.plan.validations import read_validations
from partool.spec.judging import BestSpec

_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = ".aside"


def checkpoint_folder(run: Run, plan: Plan) -> Path:
    """Return the folder that holds the checkpoints of ``run`` if it is trained with ``plan``."""
    return Path(plan.checkpoint.dir) / run.id if plan.checkpoint.dir else run.path / "checkpoints"


def complete(folder: Path) -> dict[int, Path]:
    """Return a mapping from the step of each complete checkpoint to the checkpoint's folder, lowest step first."""
    if not folder.is_dir():
        return {}
    folders = {int(match[1]): entry for entry in folder.iterdir() if (match := _STEP.fullmatch(entry.name))}
    return dict(sorted(folders.items()))


def best_step(folder: Path, plan: Plan) -> int | None:
    """Return the step of the best validation among complete checkpoints, by the plan's figure; None if none is known.

    Raises DamagedRecordError and OSError.
    """
    best = read_validations(folder).best(plan.checkpoint.best or BestSpec(), 1, complete(folder).keys())
    return best[0] if best else None


def best_words(run: Run) -> str:
    """Return the best validation of a run that keeps its checkpoint; empty if none is known."""
    try:
        plan = Plan.from_json(run.plan_file.read_text(encoding="utf-8"))
        judged = plan.checkpoint.best
        folder = checkpoint_folder(run, plan)
        step = None if judged is None else best_step(folder, plan)
        if judged is None or step is None:
            return ""
        (value,) = (row.figures[judged.metric] for row in read_validations(folder).rows if row.step == step)
    except (OSError, ValueError):
        return ""
    return f"best {judged.metric} {value:.4g} after step {step}"


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints later than ``step``, so that ``step`` is the newest; returns their new paths.

    The newest checkpoint is renamed first. After an interrupt the remaining checkpoints therefore still belong to one
    continuous training, and another call renames the rest.
    """
    moved = []
    for later, path in reversed(complete(folder).items()):
        if later > step:
            moved.append(path.rename(_free_name(path)))
    if moved:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return moved


def _free_name(path: Path) -> Path:
    candidate, number = path.with_name(path.name + _ASIDE), 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}{_ASIDE}{number}")
    return candidate
