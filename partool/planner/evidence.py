"""Evidence behind a layout: its tier, and by how much it must be faster than a layout with more evidence."""

from __future__ import annotations

from partool.cost.evidence import WORDS, mechanisms, pair_error
from partool.plan.layout import Layout
from partool.spec.spec import Spec
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS
from partool.strategies.tiers import OFFLOAD_OPTIMIZER, OFFLOAD_REST, TENSOR_2D

LONG_TOKENS = 65_536
"""Tokens of a sequence from which sequence parallelism is common practice: Llama 3 uses it from 131,072 on (arXiv
2407.21783, table 4), torchtitan's and NeMo's tables from 65,536 and 16,384 on."""


def taken_for_granted(spec: Spec) -> frozenset[str]:
    """Return the mechanisms that do not count for a layout's tier: the spec asks for them, or its sequences are long.

    Mechanisms are named as in :data:`partool.cost.evidence.WORDS`; ``long_sequence`` stands for the sequence methods
    that published runs of long sequences use.
    """
    parallel, offload = spec.parallel, spec.parallel.offload
    asked = {
        "other_schedules": parallel.pipeline.schedule != "auto",
        "sequence": parallel.sequence.method != "auto" or parallel.sequence.degree != "auto",
        "tensor_2d": parallel.tensor.shape != "auto",
        "offload_optimizer": offload.optimizer in ("cpu", "nvme") or offload.parameters in ("cpu", "nvme"),
        "offload_parameters": offload.parameters in ("cpu", "nvme"),
        "offload_activations": offload.activations == "cpu",
        "long_sequence": spec.training.sequence_length >= LONG_TOKENS,
    }
    assert asked.keys() - {"long_sequence"} <= WORDS.keys()
    return frozenset(name for name, wanted in asked.items() if wanted)


def asked_for(spec: Spec) -> frozenset[str]:
    """Return the mechanisms that the spec asks for, by their names in :data:`partool.cost.evidence.WORDS`.

    What they may err is no reason against a layout: the user has decided.
    """
    parallel = spec.parallel
    degrees = {
        "tensor": parallel.tensor.degree != "auto" or parallel.tensor.shape != "auto",
        "pipeline": parallel.pipeline.stages != "auto" or parallel.pipeline.schedule != "auto",
        "expert": parallel.expert != "auto" or parallel.expert_tensor != "auto",
    }
    granted = taken_for_granted(spec) - {"long_sequence"}
    return granted | {name for name, wanted in degrees.items() if wanted}


def sequence_tier(method: str, granted: frozenset[str]) -> int:
    """Return the tier of a sequence method."""
    record = METHODS[method]
    free = "sequence" in granted or ("long_sequence" in granted and record.common)
    return 0 if free else record.tier


def schedule_tier(schedule: str, granted: frozenset[str]) -> int:
    """Return the tier of a pipeline schedule; a schedule that the user's file lists has tier 1."""
    if "other_schedules" in granted:
        return 0
    return SCHEDULES[schedule].tier if schedule in SCHEDULES else 1


def tier_of(layout: Layout, granted: frozenset[str]) -> int:
    """Return the tier of a layout: the highest tier of its mechanisms that are not ``granted``."""
    offload, mesh = layout.offload, layout.mesh
    optimizer = {"none": 0, "cpu": OFFLOAD_OPTIMIZER, "nvme": OFFLOAD_REST}[offload.optimizer]
    return max(
        schedule_tier(layout.pipeline.schedule, granted) if mesh.pp > 1 else 0,
        sequence_tier(layout.sequence.method, granted) if mesh.cp > 1 else 0,
        TENSOR_2D if layout.tensor.inner > 1 and "tensor_2d" not in granted else 0,
        optimizer if "offload_optimizer" not in granted else 0,
        OFFLOAD_REST if offload.parameters != "none" and "offload_parameters" not in granted else 0,
        OFFLOAD_REST if offload.activations != "none" and "offload_activations" not in granted else 0,
    )


def margin(layout: Layout, other: Layout) -> float:
    """Return by how much ``layout`` must be faster than ``other``: twice the paired error of what tells them apart.

    Layouts with the same mechanisms are told apart by their degrees: the errors of all their mechanisms count.
    """
    ours, theirs = set(mechanisms(layout)), set(mechanisms(other))
    return 2.0 * max(pair_error(name) for name in ours ^ theirs or ours)
