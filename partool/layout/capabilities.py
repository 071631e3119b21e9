"""What the runtime runs, each entry with the test that holds it to a single process; and what it does not run yet.

A plan that needs something outside this table is still priced and printed, with ``runnable: false`` and a rule code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from partool.spec.model import ModelConfig

_ZERO = "tests/parity/test_zero.py"
_MODEL = "tests/unit/test_runtime_model.py"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a plan asks of the runtime."""

    model: ModelConfig
    frozen: bool
    backend: str
    nodes: int
    zero: int
    replicas: int
    """Copies of the training state (``dp_replicate``)."""
    tensor: int
    stages: int
    sequence: int
    expert: int
    offload_optimizer: str
    accumulation: int
    recompute: frozenset[str]
    compile: str
    precision: str


@dataclass(frozen=True, slots=True)
class Capability:
    """Something the runtime does."""

    id: str
    what: str
    parity_test: str
    """``path::function`` of the test that compares it with a single process."""
    applies: Callable[[Needs], bool]
    """True if a plan uses it."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that can be planned but not run yet."""

    code: str
    """Rule code, PT4xx."""
    what: str
    path: tuple[str, ...]
    """Place in the spec that asks for it."""
    applies: Callable[[Needs], bool]


CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        "dense-decoder",
        "dense decoders with full attention",
        f"{_MODEL}::test_attention_matches_reference",
        lambda n: n.model.moe is None,
    ),
)

GAPS: tuple[Gap, ...] = (
    Gap("PT401", "tensor parallelism", ("parallel", "tensor"), lambda n: n.tensor > 1),
    Gap("PT402", "pipeline parallelism", ("parallel", "pipeline", "stages"), lambda n: n.stages > 1),
    Gap("PT403", "sequence parallelism", ("parallel", "sequence", "degree"), lambda n: n.sequence > 1),
    Gap("PT404", "expert parallelism", ("parallel", "expert"), lambda n: n.expert > 1),
    Gap("PT405", "mixture-of-experts layers", ("model",), lambda n: n.model.moe is not None),
    Gap("PT406", "multi-head latent attention", ("model",), lambda n: n.model.mla is not None),
    Gap(
        "PT407",
        "optimizer states in host memory",
        ("parallel", "offload", "optimizer"),
        lambda n: n.offload_optimizer != "none",
    ),
    Gap("PT408", "AMD accelerators (ROCm)", ("hardware", "accelerator"), lambda n: n.backend == "rocm"),
    Gap("PT409", "starting ranks on more than one node", ("hardware", "nodes"), lambda n: n.nodes > 1),
)


def gaps(needs: Needs) -> tuple[Gap, ...]:
    """Return what a plan needs and the runtime does not run yet; empty means runnable."""
    return tuple(gap for gap in GAPS if gap.applies(needs))
