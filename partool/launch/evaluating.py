"""The spec of an evaluation of a run, of one of its checkpoints, or of a folder of transformers'."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partool.plan.types import Plan
from partool.strategies.jobs import JOBS

_EVALUATE = "evaluate"
_LONGEST_NAME = 48
_PRECISIONS = {"float64": "fp64", "float32": "fp32"}
_OF_SCHEDULES = ("pipeline.waves", "pipeline.in_flight", "pipeline.layers", "offload")
"""Fields of ``parallel`` that belong to what an evaluation does not have."""
_OF_TRAININGS = ("launch", "telemetry.profile", "training.epochs", "training.tokens", "evaluation")
_LONGEST = 4096
"""Tokens of a sequence for a folder whose model takes more: longer ones cost memory, and few tasks need them."""


@dataclass(frozen=True, slots=True)
class TasksOption:
    """Tasks that the command line names; no tasks ask for the loss over the data."""

    tasks: tuple[str, ...] = ()
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None

    def section(self) -> dict[str, Any]:
        """Return the section ``evaluation`` of a spec, with absolute paths."""
        if not self.tasks:
            return {}
        tasks = [str(Path(task).absolute()) if task.endswith((".yaml", ".yml")) else task for task in self.tasks]
        fields = {
            "tasks": tasks,
            "include_path": None if self.include_path is None else str(self.include_path.absolute()),
            "limit": self.limit,
            "num_fewshot": self.num_fewshot,
        }
        return {name: value for name, value in fields.items() if value is not None}


def spec_of_run(plan: Plan, checkpoint: Path, tasks: TasksOption) -> dict[str, Any]:
    """Return the spec that evaluates a checkpoint of a run with this plan, on this machine.

    Its layout is free where the run's spec leaves it free. Relative paths start from :func:`base_dir_of`.
    """
    spec: dict[str, Any] = json.loads(json.dumps(plan.spec))
    of_layouts = (f"parallel.{name}" for name in (*JOBS[_EVALUATE].settled, *_OF_SCHEDULES))
    for path in (*JOBS[_EVALUATE].unread, *of_layouts, *_OF_TRAININGS):
        _drop(spec, path.split("."))
    model = spec["model"] if isinstance(spec["model"], dict) else {"preset": spec["model"]}
    if plan.own_decoder and not {"preset", "config"} & model.keys():
        model["vocab"] = plan.model.vocab  # which the data may have told
    model["weights"] = {"source": "checkpoint", "path": str(checkpoint.absolute())}
    training = spec.get("training", {}) | {"steps": plan.training.steps}
    name = f"eval-{plan.name}"[:_LONGEST_NAME].rstrip("-")
    spec |= {"job": _EVALUATE, "name": name, "model": model, "training": training}
    section = tasks.section()
    if section:
        tokens = plan.data.model_dump(mode="json", include={"tokenizer", "special_tokens"}, exclude_defaults=True)
        spec |= {"data": tokens, "evaluation": section}
    return spec


def spec_of_folder(folder: Path, tasks: TasksOption, *, by_transformers: bool) -> dict[str, Any]:
    """Return the spec that evaluates a folder of transformers' on this machine.

    ``by_transformers`` builds the model with transformers, which knows more families than partool's own decoder.
    """
    path, config = folder.absolute(), _config(folder)
    longest = config.get("max_position_embeddings")
    model: dict[str, Any] = {"hf": str(path)} if by_transformers else {"config": str(path / "config.json")}
    training: dict[str, Any] = {"global_batch": 64}
    training["sequence_length"] = min(longest, _LONGEST) if isinstance(longest, int) and longest > 0 else _LONGEST
    if precision := _PRECISIONS.get(str(config.get("dtype", config.get("torch_dtype")))):
        training["precision"] = precision
    spec: dict[str, Any] = {
        "job": _EVALUATE,
        "name": "eval",
        "model": model | {"weights": {"source": "hf", "path": str(path)}},
        "data": {"tokenizer": str(path)},
        "training": training,
    }
    section = tasks.section()
    return spec | ({"evaluation": section} if section else {})


def base_dir_of(plan: Plan) -> Path:
    """Return the folder from which the relative paths of a run's spec start, as its absolute paths tell.

    Without a relative path it is the current folder.
    """
    for written, absolute in _paths(plan):
        if not Path(written).is_absolute() and absolute.endswith(f"/{written}"):
            return Path(absolute.removesuffix(f"/{written}") or "/")
    return Path.cwd()


def _paths(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield paths as a run's spec has them, each with the absolute path of its plan."""
    data, model, resolved = plan.spec.get("data", {}), plan.spec.get("model", {}), plan.data
    weights = model.get("weights", {})
    pairs: list[tuple[Any, Any]] = [
        (data.get("source"), resolved.source),
        (data.get("validation_source"), resolved.validation_source),
        (data.get("tokenizer"), resolved.tokenizer),
        (data.get("cache"), resolved.cache),
        (weights.get("path"), plan.weights.path),
        (model.get("hf"), plan.hf.path if plan.hf is not None else None),
        *((each.get("source"), part.source) for each, part in zip(data.get("mix", []), resolved.mix, strict=True)),
        *(
            (each.get("source"), resolved.validation_sets[name].source)
            for name, each in data.get("validation_sets", {}).items()
        ),
    ]
    for written, absolute in pairs:
        if isinstance(written, str) and isinstance(absolute, str):
            yield written, absolute
        elif isinstance(written, list) and isinstance(absolute, list):
            yield from zip(written, absolute, strict=True)


def _drop(spec: dict[str, Any], path: list[str]) -> None:
    """Remove a field of a spec, if it has it, and sections of which nothing remains."""
    value = spec.get(path[0])
    if len(path) == 1:
        spec.pop(path[0], None)
    elif isinstance(value, dict):
        _drop(value, path[1:])
        if not value:
            del spec[path[0]]


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
