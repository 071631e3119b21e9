"""Random problems for tests of the search: small models on up to 32 devices, with every mechanism open or pinned.

``pick`` makes each choice: ``random.Random(seed).choice``, or a draw of hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partool.catalog.hardware import resolve_hardware
from partool.catalog.models import resolve_model
from partool.planner.problem import Problem
from partool.planner.search.enumeration import build
from partool.spec.spec import Spec

Pick = Callable[[Sequence[Any]], Any]
"""Function that chooses one of several values."""
ACCELERATORS = ("h100-sxm", "a100-80", "mi300x", "gh200-96", "cpu")


def document(pick: Pick, *, devices: int = 32, most_layers: int = 8) -> dict[str, Any]:
    """Return a random spec as a document; ``pick`` makes each choice."""
    layers = pick(range(1, most_layers + 1))
    nodes = pick([n for n in (1, 1, 2, 3, 4) if n <= devices])
    per_node = pick([n for n in (1, 2, 3, 4, 6, 8) if n * nodes <= devices])
    accelerator = pick(ACCELERATORS)
    hardware: dict[str, Any] = {"accelerator": accelerator, "nodes": nodes, "per_node": per_node}
    if accelerator == "cpu":
        hardware = {"accelerator": "cpu", "per_node": nodes * per_node, "memory_gib": pick([16, 256])}
    elif pick([False, True]):
        hardware |= {"memory_gib": pick([1, 2, 4, 16]), "fabric": pick(["ib-ndr", "ethernet-100g"])}
    return {
        "model": model(pick, layers),
        "hardware": hardware,
        "training": {
            "sequence_length": pick([256, 1024, 4096, 32768]),
            "global_batch": nodes * per_node * pick([1, 2, 4, 12]),
            "precision": pick(["bf16", "bf16", "fp32"]),
        },
        "parallel": parallel(pick, layers),
    }


def model(pick: Pick, layers: int) -> dict[str, Any]:
    """Return a random model of ``layers`` layers; some have experts or windows, so that layers differ."""
    hidden = pick([256, 1024, 4096])
    found: dict[str, Any] = {
        "layers": layers, "hidden": hidden, "heads": 8, "kv_heads": pick([2, 8]), "ffn_hidden": pick([1, 4]) * hidden,
        "vocab": pick([512, 32000, 128256]), "max_position": 32768,
    }  # fmt: skip
    if pick([False, False, True]):
        found["moe"] = {"experts": 4, "top_k": 2, "ffn_hidden": hidden, "every": pick([1, 2])}
        found["moe"]["first_dense_layers"] = pick([0, 1]) if layers > 1 else 0
    if pick([False, False, True]):
        kinds = ["full", *(pick(["full", "sliding"]) for _ in range(layers - 1))]
        found["attention"] = {"window": 256, "layer_types": kinds} if "sliding" in kinds else {}
    return found


def parallel(pick: Pick, layers: int) -> dict[str, Any]:
    """Return a random section ``parallel``: everything is open, apart from a few fields at a time."""
    pinned = pick([None, None, "recompute", "schedule", "zero", "tiles", "offload", "layers"])
    found: dict[str, Any] = {"compile": pick(["auto", "none"])}
    if pinned == "recompute":
        policies = ["none", "attention", "selective", "keep_attention", "full"]
        found["recompute"] = pick([*policies, [pick(policies) for _ in range(layers)]])
    elif pinned == "schedule":
        found["pipeline"] = {"schedule": pick(["hanayo", "zb-v", "zb-h1", "interleaved", "weipipe-zb", "weipipe"])}
    elif pinned == "zero":
        found["data"] = {"zero": pick([1, 2, 3]), "prefetch": pick([0, 1])}
    elif pinned == "tiles":
        found["tiles"] = {"loss": 128, "mlp": 128}
    elif pinned == "offload":
        found["offload"] = pick(
            [
                "cpu",
                {"optimizer": "cpu", "speculate": pick([False, "undo"])},
                {"activations": "cpu"},
                {"optimizer": "cpu", "gpu_fraction": pick([0.5, 0.99])},
            ]
        )
    elif pinned == "layers" and layers > 2:
        found["pipeline"] = {"layers": [1, layers - 1], "stages": 2}
    return found


NARROWER: dict[str, tuple[Any, ...]] = {
    "micro_batch": (1, 2),
    "tensor": (1, 2),
    "sequence": (1, {"degree": 2}),
    "recompute": ("none", "selective", "full"),
    "data": ({"zero": 1}, {"zero": 2}, {"zero": 3}),
    "pipeline": ({"stages": 1}, {"stages": 2}, {"stages": 4}),
    "offload": ("none", {"activations": "none"}, {"optimizer": "none", "parameters": "none"}),
    "expert": (1, 2),
}
"""Values of fields of the section ``parallel`` that make a space smaller."""


def narrowed(pick: Pick, made: dict[str, Any], most: int) -> Problem | None:
    """Return the problem with fields pinned in random order until it has ``most`` layouts or fewer.

    Fields that the document pins stay as they are. Returns None if no layout is left, or still too many.
    """
    problem, left = problem_of(made), [name for name in NARROWER if name not in made["parallel"]]
    while (count := layouts_of(problem)) > most and left:
        name = pick(left)
        left.remove(name)
        value = pick(NARROWER[name])
        made = {**made, "parallel": {**made["parallel"], name: value}}
        problem = problem_of(made)
    return problem if 0 < count <= most else None


def layouts_of(problem: Problem) -> int:
    """Return the number of layouts to search."""
    space = build(problem)
    return int(space.allowed(np.arange(space.size)[:, None], np.arange(len(space.policies))[None, :]).sum())


def problem_of(made: dict[str, Any]) -> Problem:
    """Return the problem of a document."""
    spec = Spec.model_validate({"data": {"source": "python-stdlib"}, **made})
    config = resolve_model(spec.model, Path(__file__)).config
    devices = resolve_hardware(spec.hardware, spec.training.precision, spec.limits.max_devices).devices
    assert config is not None
    assert devices is not None
    return Problem(spec, config, devices)
