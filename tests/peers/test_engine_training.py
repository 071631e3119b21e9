"""What partool writes for another system trains as partool's runtime does: two CPU ranks, the same weights and tokens.

DeepSpeed 0.19.8, accelerate 1.15.0, transformers 5.24.0 and torch 2.13.0; ``make peers`` installs those that are not
partool's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from _peers import HERE, environment, needed
from _writes import command
from planned import plan_of

from partool.plan.types import Plan
from partool.render.program import program

sys.path.append(str(HERE.parent / "bench"))
from _start import start_ranks

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
RTOL = 1e-5
SIZES = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


def plan_for(engine: str, model: Path, zero: int, schedule: dict[str, Any]) -> Plan:
    """Return the plan of one spec for an engine."""
    spec = {
        "spec": 1,
        "engine": engine,
        "model": {"hf": str(model), "weights": {"source": "hf", "path": str(model)}},
        "hardware": {"accelerator": "cpu" if engine == "partool" else "h100-sxm", "nodes": 1, "per_node": 2},
        "training": {"sequence_length": 16, "global_batch": 8, "steps": 5, "precision": "fp32",
                     "validation": {"every": 0}},
        "optimizer": {"lr": 1e-2, "clip": 0.5, "weight_decay": 0.1, "schedule": schedule},
        "data": {"source": "python-stdlib", "validation": 0.0},
        "parallel": {"data": {"zero": zero}, "micro_batch": 2, "recompute": "none", "compile": "none", "tensor": 1,
                     "pipeline": {"stages": 1}},
    }  # fmt: skip
    return plan_of(json.dumps(spec))


def losses(folder: Path, side: str, cases: list[tuple[Plan, dict[str, Any]]], model: Path) -> list[list[float]]:
    """Train each case on two ranks; return the loss of each step."""
    folder.mkdir()
    plan = cases[0][0]
    job = {
        "side": side, "world": 2, "vocab": 259, "length": 16, "steps": 5, "micro": plan.layout.micro_batch,
        "accumulation": plan.layout.derived.accumulation, "model": str(model), "folder": str(folder),
        "cases": [more | {"zero": plan.layout.data.zero, "plan": plan.to_json()} for plan, more in cases],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    own = environment() | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    own["PYTHONPATH"] = os.pathsep.join((str(HERE), str(HERE.parent)))
    start_ranks(HERE / "_train_rank.py", folder, 2, 1500, environment=own)
    found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert found[0] == found[1]
    result: list[list[float]] = found[0]
    return result


def same(ours: list[float], theirs: list[float], name: str) -> None:
    """Check that losses are the same and that something is learnt."""
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    print(f"{name}: losses {theirs}, apart {apart:.1e}")
    assert ours[-1] < ours[0] - 0.1
    assert apart <= RTOL, (ours, theirs)


CONSTANT = {"kind": "constant", "warmup_steps": 0}


STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def ours(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """The losses of partool's runtime, by ZeRO stage."""
    plans = [plan_for("partool", model, zero, CONSTANT) for zero in STAGES]
    found = losses(tmp_path_factory.mktemp("ours") / "ranks", "partool", [(plan, {}) for plan in plans], model)
    return dict(zip(STAGES, found, strict=True))


def test_deepspeed_trains_alike(model: Path, ours: dict[int, list[float]], tmp_path: Path) -> None:
    needed("deepspeed")
    plans = [plan_for("deepspeed", model, zero, CONSTANT) for zero in STAGES]
    cases = [(plan, {"config": program(plan).files["ds_config.json"]}) for plan in plans]
    theirs = losses(tmp_path / "ranks", "deepspeed", cases, model)
    for zero, found in zip(STAGES, theirs, strict=True):
        same(ours[zero], found, f"DeepSpeed, ZeRO-{zero}")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_plugin_of_accelerate_trains_alike(
    model: Path, ours: dict[int, list[float]], tmp_path: Path, zero: int
) -> None:
    needed("deepspeed")
    needed("accelerate")
    plan = plan_for("deepspeed", model, zero, CONSTANT)
    (theirs,) = losses(tmp_path / "ranks", "plugin", [(plan, {"config": program(plan).files["ds_config.json"]})], model)
    same(ours[zero], theirs, f"accelerate's plugin for DeepSpeed, ZeRO-{zero}")


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_accelerate_trains_alike(model: Path, ours: dict[int, list[float]], tmp_path: Path, zero: int) -> None:
    needed("accelerate")
    plan = plan_for("accelerate", model, zero, CONSTANT)
    words, _ = command(plan, tmp_path)
    at = words.index("mine.py")
    told = {"options": words[1:at], "arguments": words[at + 1 :]}
    (theirs,) = losses(tmp_path / "ranks", "accelerate", [(plan, told)], model)
    same(ours[zero], theirs, f"Trainer, {'FSDP2' if zero else 'DDP'}, ZeRO-{zero}")
