"""Jobs of the offload benchmarks: the models, the shapes of steps, and the message format between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from partool.plan.types import Plan

SideName = Literal["offloaded", "waiting", "reference", "device", "deepspeed"]
"""Sides that make steps: partool with the optimizer in host memory, speculating or waiting for the norm; a loop written
by hand around the same pass, which has all gradients before it updates; partool with the optimizer on the device;
DeepSpeed's ZeRO-Offload."""
OFFLOADS: dict[SideName, dict[str, object]] = {
    "offloaded": {"parallel.offload.optimizer": "cpu", "parallel.offload.speculate": "true"},
    "waiting": {"parallel.offload.optimizer": "cpu", "parallel.offload.speculate": "false"},
    "reference": {"parallel.offload.optimizer": "none"},
    "device": {"parallel.offload.optimizer": "none"},
    "deepspeed": {"parallel.offload.optimizer": "none"},
}
NEVER, ALWAYS = 1e9, 1e-3
"""Limits of the gradient norm: no step is clipped, as in most of a fine-tune; every step is clipped."""
SIZES: dict[str, dict[str, Any]] = {
    "3B": {"layers": 28, "hidden": 3072, "ffn_hidden": 8192, "heads": 24, "kv_heads": 8, "vocab": 32000},
    "6.5B": {"layers": 31, "hidden": 4096, "ffn_hidden": 11008, "heads": 32, "kv_heads": 32, "vocab": 32000},
    "1B": {"layers": 16, "hidden": 2048, "ffn_hidden": 8192, "heads": 16, "kv_heads": 8, "vocab": 32000},
    "40M": {"layers": 6, "hidden": 640, "ffn_hidden": 1728, "heads": 10, "kv_heads": 5, "vocab": 8192},
    "tiny": {"layers": 3, "hidden": 64, "ffn_hidden": 172, "heads": 4, "kv_heads": 2, "vocab": 260},
}


@dataclass(frozen=True, slots=True)
class Job:
    """Job that a side's process reads when it starts."""

    side: SideName
    plan: str
    """The plan as JSON."""
    deepspeed: str = ""
    """Folder with DeepSpeed's packages."""
    built: str = ""
    """Folder for DeepSpeed's compiled optimizer."""

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive steps of one shape: micro-batches, sequences and tokens."""

    first: int
    """Number of the first step, which seeds the random tokens of its batch."""
    count: int
    micro_batches: int
    sequences: int
    tokens: int
    clip: float = NEVER


def make_plan(folder: Path, size: str, settings: Mapping[str, object], *options: str) -> Path:
    """Plan one of :data:`SIZES` for one device of this machine, or its CPU; return the plan's file.

    Raises ``RuntimeError`` if there is no such plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "name": "offload",
        "model": SIZES[size] | {"max_position": 8192, "weights": {"source": "dummy"}},
        "hardware": {"accelerator": "auto", "per_node": 1},
        "data": {"source": "python-stdlib", "validation": 0.0},
        "training": {"steps": 10**6, "precision": "bf16", "validation": {"every": 0}},
        "optimizer": {"lr": 1e-5, "schedule": {"kind": "constant", "warmup_steps": 0}},
        "parallel": {"data": {"zero": 2}, "recompute": "full", "compile": "none"},
        "kernels": {"fused": []},
        "checkpoint": {"every": 0},
    }
    source = folder / "spec.yaml"
    source.write_text(json.dumps({"spec": 1, **spec}), encoding="utf-8")
    sets = [f"--set={key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-c", "from partool.cli.main import run; run()", "plan", str(source), *sets, *options]
    done = subprocess.run([*command, "--out", str(folder / "plan.json")], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"no plan of {size} with {dict(settings)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return folder / "plan.json"


def shape_settings(steps: Steps) -> dict[str, object]:
    """Return the plan's settings for steps of this shape."""
    return {
        "training.sequence_length": steps.tokens,
        "training.global_batch": steps.sequences * steps.micro_batches,
        "parallel.micro_batch": steps.sequences,
    }


def read_plan(path: Path) -> Plan:
    """Read a plan's file."""
    return Plan.from_json(path.read_text(encoding="utf-8"))
