"""Ranks of test_adapters.py: the trainer, whose adapters start with B ≠ 0, and the frozen weights afterwards."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _trainer_worker import train_plan

from partool.spec.model import ModelConfig
from partool_runtime.jobs.train import trainer
from partool_runtime.jobs.train.loop import TrainingLoop
from partool_runtime.pieces import pieces
from partool_runtime.weights.draw import BlockSource, init_source

filling: Any = importlib.import_module("partool_runtime.weights.fill")  # the package has its function by this name
UNCHANGED = "frozen-{}.json"
"""Name of a rank's file: names of frozen parameters, and whether the rank's parts of them have their first bits."""
_SIZED = ModelConfig(layers=1, hidden=8, ffn_hidden=8, heads=1, kv_heads=1, head_dim=8, vocab=8, init_std=0.3)


def noise(seed: int) -> BlockSource:
    """Return a source of adapters in which B is not zero."""
    return init_source(_SIZED, seed)


def train_adapter(plan_json: str, run_dir: Path, resume: bool, stop_at: int) -> str:
    """Train as one rank; see the module."""
    with _watched(run_dir / UNCHANGED.format(os.environ["RANK"])):
        return train_plan(plan_json, run_dir, resume, stop_at)


@contextmanager
def _watched(path: Path) -> Iterator[None]:
    source, opened, steps = filling.adapter_source, trainer.post_load, TrainingLoop.steps
    held: dict[str, tuple[Any, Any, list[torch.Tensor]]] = {}

    def loaded(model: Any) -> None:
        opened(model)
        for name, parameter in model.named_parameters():
            placement = model.placements.get(name)
            if not parameter.requires_grad:
                held[name] = (parameter, placement, [each.tensor.clone() for each in pieces(parameter, placement)])

    def run(self: Any, first: int) -> tuple[int, str]:
        ended = steps(self, first)
        same = {
            name: all(torch.equal(new.tensor, old) for new, old in zip(pieces(p, placement), before, strict=True))
            for name, (p, placement, before) in held.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(same))
        return ended

    filling.adapter_source, trainer.post_load, TrainingLoop.steps = noise, loaded, run  # type: ignore[method-assign]
    try:
        yield
    finally:
        filling.adapter_source, trainer.post_load, TrainingLoop.steps = source, opened, steps  # type: ignore[method-assign]
