"""The teacher of ``training.distill``: its model from its folder, and its place in the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from partool.catalog.models import resolve_model
from partool.diagnostics.record import Diagnostic
from partool.plan.run import PLAN_FILE
from partool.plan.types import TeacherModel
from partool.spec.model import ModelConfig, ModelSpec, Weights
from partool.spec.spec import Spec

PATH = ("training", "distill", "teacher")
_HELP = "give a Hugging Face folder, one of partool export, or the folder of a run of partool's own decoder"


class ResolvedTeacher(NamedTuple):
    """The teacher that a spec names; None without one, or if there are errors among the findings."""

    teacher: TeacherModel | None
    findings: list[Diagnostic]


def resolve_teacher(spec: Spec, base_dir: Path) -> ResolvedTeacher:
    """Return the teacher of a spec, with every field of its model decided, and findings about its folder (PT680)."""
    distill = spec.training.distill
    if distill is None:
        return ResolvedTeacher(None, [])
    folder = (base_dir / distill.teacher).expanduser().absolute()
    plan = _plan_of_run(folder)
    if plan is not None:
        return _of_run(plan, folder)
    if not (folder / "config.json").is_file():
        message = f"{folder} holds no config.json and is no run, so that the teacher's model is not known"
        return ResolvedTeacher(None, [Diagnostic("PT680", message, path=PATH, help=_HELP)])
    resolved = resolve_model(ModelSpec(config=str(folder)), base_dir)
    errors = [finding for finding in resolved.diagnostics if finding.severity == "error"]
    if resolved.config is None or errors:
        reasons = "; ".join(f"{finding.code}: {finding.message}" for finding in errors)
        message = f"partool cannot build the teacher in {folder}: {reasons}"
        return ResolvedTeacher(None, [Diagnostic("PT680", message, path=PATH, help=_HELP)])
    return ResolvedTeacher(TeacherModel(model=resolved.config, weights=Weights(source="hf", path=str(folder))), [])


def _plan_of_run(folder: Path) -> Path | None:
    """Return the plan of the run whose folder, or folder of checkpoints, or checkpoint this is; None if it is none."""
    parents = [folder]
    if folder.name == "checkpoints":
        parents = [folder.parent]
    elif folder.name.startswith("step-"):
        parents = [folder.parent.parent, folder.parent]
    return next((file for parent in parents if (file := parent / PLAN_FILE).is_file()), None)


def _of_run(file: Path, folder: Path) -> ResolvedTeacher:
    """Return the teacher that a run of partool has trained, or is training."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        model = ModelConfig.model_validate_json(json.dumps(fields["model"]))
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        message = f"{file} does not say which model the teacher is: {type(error).__name__}"
        return ResolvedTeacher(None, [Diagnostic("PT680", message, path=PATH, help=_HELP)])
    other = next((name for name in ("hf", "module", "adapter") if fields.get(name) is not None), None)
    if other is not None:
        what = "an adapter" if other == "adapter" else "a model of other code"
        message = f"the run of {file} trained {what}, and a teacher is partool's own decoder with all its weights"
        help = "export it, merged, with partool export, and give that folder"
        return ResolvedTeacher(None, [Diagnostic("PT680", message, path=PATH, help=help)])
    return ResolvedTeacher(TeacherModel(model=model, weights=Weights(source="checkpoint", path=str(folder))), [])
