"""A small plan, built by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from layouts import new_layout

from partool.plan.layout import Mesh
from partool.plan.types import Devices, MemoryPrediction, Plan, Prediction, TimePrediction
from partool.spec.data import DataSpec
from partool.spec.launch import LaunchSpec
from partool.spec.model import ModelConfig, Weights
from partool.spec.training import CheckpointSpec, KernelsSpec, LrSchedule, OptimizerSpec, TrainingSpec, Validation

LAYERS = 2


def small_plan(
    data: Path,
    *,
    ranks: int = 2,
    zero: int = 1,
    accumulation: int = 2,
    precision: str = "fp32",
    steps: int = 6,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    recompute: str = "none",
) -> Plan:
    """Return a plan of a byte-level decoder of odd width on the files of a folder; 12 sequences of 16 tokens a step."""
    fields = {"layers": LAYERS, "hidden": 30, "ffn_hidden": 37, "heads": 5, "kv_heads": 5, "head_dim": 6, "vocab": 257}
    memory = MemoryPrediction(rank=0, terms_bytes={}, total_bytes=1, capacity_bytes=1, fit_probability=1.0)
    time = TimePrediction(
        terms_s={},
        step_time_s=1.0,
        tokens_per_s=1.0,
        model_flops=1.0,
        mfu=None,
        total_s=1.0,
        device_hours=1.0,
        traffic_bytes={},
    )
    return Plan(
        partool_version="0",
        name="small",
        model=ModelConfig.model_validate(fields | (model or {})),
        model_source="spec",
        weights=Weights(),
        devices=Devices(
            accelerator="cpu",
            backend="cpu",
            nodes=1,
            per_node=ranks,
            memory_bytes=2**32,
            peak_flops=None,
            achievable_flops=1e9,
            memory_bytes_per_s=1e9,
            link_bytes_per_s=1e9,
            fabric_bytes_per_s=1e9,
            threads_per_rank=1,
        ),
        layout=new_layout(
            mesh=Mesh(dp_shard=ranks),
            zero=zero,
            micro_batch=12 // ranks // accumulation,
            accumulation=accumulation,
            recompute=(recompute,) * LAYERS,
            compile="none",
            stages=((0, LAYERS),),
        ),
        training=TrainingSpec.model_validate(
            {
                "sequence_length": 16,
                "global_batch": 12,
                "steps": steps,
                "precision": precision,
                "validation": Validation(every=3, samples=5),
            }
            | (training or {})
        ),
        optimizer=OptimizerSpec(lr=1e-2, schedule=LrSchedule(kind="constant", warmup_steps=2)),
        data=DataSpec(source=str(data), validation=0.2, cache=str(data.parent / "cache")),
        kernels=KernelsSpec(),
        checkpoint=CheckpointSpec.model_validate({"every": 2, "keep": 9} | (checkpoint or {})),
        launch=LaunchSpec(),
        prediction=Prediction(memory=memory, time=time, relative_error=1.0),
        runnable=True,
        spec={},
    )


def write_text(folder: Path) -> None:
    """Write a few text files with something to learn."""
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox " * (20 + number))
