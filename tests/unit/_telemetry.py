"""A plan made by hand, for the telemetry tests."""

from __future__ import annotations

from typing import Any

from layouts import new_layout

from partool.plan.layout import Mesh
from partool.plan.terms import MEMORY_TERMS, TIME_TERMS, TRAFFIC_TERMS
from partool.plan.types import Devices, MemoryPrediction, Plan, Prediction, TimePrediction
from partool.spec.data import DataSpec
from partool.spec.launch import LaunchSpec
from partool.spec.model import ModelConfig, Weights
from partool.spec.training import CheckpointSpec, KernelsSpec, OptimizerSpec, TrainingSpec


def prediction(**time: Any) -> Prediction:
    terms_s = dict.fromkeys(TIME_TERMS, 0.01)
    values = {
        "terms_s": terms_s,
        "step_time_s": 0.08,
        "tokens_per_s": 100.0,
        "model_flops": 3e9,
        "mfu": None,
        "total_s": 1.0,
        "device_hours": 0.001,
        "traffic_bytes": dict.fromkeys(TRAFFIC_TERMS, 64),
    }
    return Prediction(
        memory=MemoryPrediction(
            rank=0,
            terms_bytes=dict.fromkeys(MEMORY_TERMS, 1 << 20),
            total_bytes=9 << 20,
            capacity_bytes=1 << 30,
            fit_probability=0.99,
        ),
        time=TimePrediction(**(values | time)),
        relative_error=0.2,
    )


def small_plan(*, steps: int = 12, log_every: int = 5, peak_flops: float | None = None, **changes: Any) -> Plan:
    config = ModelConfig(layers=1, hidden=8, ffn_hidden=16, heads=2, kv_heads=1, head_dim=4, vocab=32)
    devices = Devices(
        accelerator="cpu",
        backend="cpu",
        nodes=1,
        per_node=1,
        memory_bytes=1 << 30,
        peak_flops=peak_flops,
        achievable_flops=1e9,
        memory_bytes_per_s=1e9,
        link_bytes_per_s=1e9,
        fabric_bytes_per_s=1e9,
    )
    layout = new_layout(
        mesh=Mesh(), zero=0, micro_batch=2, accumulation=1, recompute=("none",), compile="none", stages=((0, 1),)
    )
    values: dict[str, Any] = {
        "partool_version": "0",
        "name": "small",
        "model": config,
        "model_source": "test",
        "weights": Weights(),
        "devices": devices,
        "layout": layout,
        "training": TrainingSpec(
            sequence_length=10, global_batch=10, steps=steps, log_every=log_every, precision="fp32"
        ),
        "optimizer": OptimizerSpec(),
        "data": DataSpec(source="python-stdlib"),
        "kernels": KernelsSpec(),
        "checkpoint": CheckpointSpec(),
        "launch": LaunchSpec(),
        "prediction": prediction(),
        "runnable": True,
        "spec": {},
    }
    return Plan(**(values | changes))
