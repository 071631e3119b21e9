"""Runs of the whole trainer for parity tests, one after the other, and what they left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _ranks import Pools, RankError
from _trainer_worker import train_plan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from partool.plan.types import Plan

AFTER_A_FAILURE_S, TO_COMPILE_S = 15.0, 200.0
"""Seconds for a run after another one has hung or died, since one fault may hang all; and for a run that compiles."""


@dataclass
class Jobs:
    """Runs in one folder; a run that hangs or dies has that text as its end, and the others go on."""

    folder: Path
    pools: Pools
    work: Callable[[str, Path, bool, int], str] = train_plan
    timeout_s: float = 60
    _ended: dict[str, list[str]] = field(default_factory=dict)
    _lost: dict[str, RankError] = field(default_factory=dict)
    """Errors of runs that hung or died, by folder; whoever reads such a folder gets the error."""

    def train(self, name: str, plan: Plan, *, run: str, resume: bool = False, stop_at: int = -1) -> None:
        """Train a plan on the ranks of its mesh, in the folder ``run``."""
        ranks = plan.layout.mesh.world_size
        arguments = (plan.to_json(), self.folder / run, resume, stop_at)
        try:
            timeout_s = self.timeout_s if plan.layout.compile == "none" else TO_COMPILE_S
            self._ended[name] = self.pools.run(ranks, self.work, *arguments, timeout_s=timeout_s)
        except RankError as error:
            self._ended[name] = [str(error)] * ranks
            self._lost[run] = error
            self.timeout_s = min(self.timeout_s, AFTER_A_FAILURE_S)

    def ended(self, name: str, rank: int = 0) -> str:
        """Return ``done`` or the exception that ended a run on a rank."""
        return self._ended[name][rank]

    def events(self, run: str, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return the data of the events of a kind that a rank has logged."""
        self._raise_if_lost(run)
        lines = (self.folder / run / "events" / f"rank-{rank}.jsonl").read_text().splitlines()
        return [event["data"] for event in map(json.loads, lines) if event["kind"] == kind]

    def state(self, run: str, step: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, by name."""
        self._raise_if_lost(run)
        whole = self.folder / "whole.pt"
        dcp_to_torch_save(self.folder / run / "checkpoints" / f"step-{step:08d}", whole)
        state = torch.load(whole)
        return {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}

    def _raise_if_lost(self, run: str) -> None:
        if run in self._lost:
            raise self._lost[run]
