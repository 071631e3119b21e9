"""Kinds of jobs: what each one runs on the ranks, which values its plans always have, and what it does not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A kind of job."""

    name: str
    title: str
    tested_by: str
    """A test that compares its ranks with one process."""
    run: str
    """``module:function`` that runs the job on one rank; the module is imported only there."""
    backward: bool = True
    """Whether its passes go backward, so that there are gradients, moments and updates."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``parallel``, by their path, that have one value in every plan of the job."""
    unread: tuple[str, ...] = ()
    """Sections and fields of a spec that the job does not read, by their path."""


_TRAIN = JobRecord(
    "train",
    "training",
    "tests/parity/test_golden_losses.py::test_losses_are_bit_identical",
    "partool_runtime.jobs.train.trainer:train",
)
_EVALUATE = JobRecord(
    "evaluate",
    "evaluation",
    "tests/parity/test_evaluation.py::test_every_layout_gives_the_loss_of_one_process",
    "partool_runtime.jobs.evaluate.job:evaluate",
    backward=False,
    settled={
        "recompute": "none", "offload.optimizer": "none", "offload.activations": "none", "offload.parameters": "none",
        "pipeline.schedule": "gpipe", "pipeline.chunks": 1,
    },
    unread=(
        "optimizer", "checkpoint", "resume", "model.frozen", "training.adversarial", "training.validation",
        "training.max_nonfinite_steps", "training.z_loss", "training.objective", "training.distill", "training.ema",
        "training.early_stop", "training.multi_token_weight", "evaluation.every",
    ),
)  # fmt: skip

JOBS: dict[str, JobRecord] = {record.name: record for record in (_TRAIN, _EVALUATE)}
"""Name of a job in specs → facts about the job."""
