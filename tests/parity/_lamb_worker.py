"""Ranks of test_lamb_trainer.py: the trainer, which also notes the bits of every block of parameters on a rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _trainer_worker import train_plan

from partool_runtime.offload import install
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.pieces import pieces

NOTED = "blocks-{}.json"
"""Name of a rank's file: [name of a parameter, offsets and sizes of a block, hash of its bytes] of each block."""


def train_and_note_blocks(plan_json: str, run_dir: Path, resume: bool, stop_at: int) -> str:
    """Train as one rank, and write what the rank holds after the last step into the folder of the run."""
    with _noted(run_dir / NOTED.format(os.environ["RANK"])):
        return train_plan(plan_json, run_dir, resume, stop_at)


@contextmanager
def _noted(path: Path) -> Iterator[None]:
    open_norms, step_of_optimizer, held = install.open_norms, DeviceOptimizer.step, {}

    def opened(plan: Any, model: Any, *rest: Any) -> Any:
        held.update({name: (p, model.placements.get(name)) for name, p in model.named_parameters()})
        return open_norms(plan, model, *rest)

    def step(self: DeviceOptimizer, lr: float, scale: float = 1.0) -> None:
        step_of_optimizer(self, lr, scale)
        blocks = [(name, block) for name, (p, placement) in held.items() for block in pieces(p, placement)]
        rows = [[name, block.offsets, list(block.tensor.shape), _hash(block.tensor)] for name, block in blocks]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows))

    install.open_norms, DeviceOptimizer.step = opened, step
    try:
        yield
    finally:
        install.open_norms, DeviceOptimizer.step = open_norms, step_of_optimizer


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
