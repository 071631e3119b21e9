"""Evidence behind a layout: its tier, and which mechanisms the spec asks for."""

from __future__ import annotations

from math import prod

from partool.cost.evidence import WORDS
from partool.plan.layout import Layout
from partool.spec.parallel import ScheduleFile
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
        "sequence": parallel.sequence.method != "auto" or _several(parallel.sequence.degree),
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

    What they may err is no reason against a layout: the user has decided. A degree above 1 asks for a mechanism, and so
    does a method of sequence parallelism; a setting of a mechanism alone does not.
    """
    parallel = spec.parallel
    tensor, pipeline = parallel.tensor, parallel.pipeline
    stages = len(pipeline.layers) if isinstance(pipeline.layers, list) else pipeline.stages
    # A schedule's file has a row for each rank; the name of a schedule asks for no pipeline.
    named = {
        "tensor": _several(tensor.degree) or (tensor.shape != "auto" and prod(tensor.shape) > 1),
        "pipeline": _several(stages) or isinstance(pipeline.schedule, ScheduleFile),
        "expert": _several(parallel.expert),
    }
    granted = taken_for_granted(spec) - {"long_sequence"}
    return granted | {name for name, wanted in named.items() if wanted}


def _several(degree: int | str) -> bool:
    """Return True if a spec sets a degree above 1."""
    return isinstance(degree, int) and degree > 1


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
