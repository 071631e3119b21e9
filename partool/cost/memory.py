"""Peak memory of the rank that needs most, by term; one small function per term."""

from __future__ import annotations

from itertools import pairwise
from math import erf, sqrt

from partool.cost.activations import activation_bytes
from partool.cost.work import Work
from partool.plan.terms import MEMORY_TERMS
from partool.plan.types import MemoryPrediction

_GIB = 2**30
CHUNK_LOGITS = 2**26
"""The runtime's loss holds at most this many logits at once."""
FRAMEWORK_BYTES = {"cpu": 290 * 2**20, "cuda": int(1.2 * _GIB), "rocm": int(1.5 * _GIB)}
"""Interpreter and libraries on a CPU rank (resident set of a torch 2.13 process with gloo before its first step);
device context and library workspaces on an accelerator (0.5 to 1.3 GiB seen by nvidia-smi, more where large ones are
kept)."""
SIGMA = 0.15
"""Relative standard deviation of closed-form memory against published peaks, before any calibration."""
FRAGMENTATION = {"cpu": 0.75, "cuda": 0.08, "rocm": 0.08}
"""Allocator overhead as a share of what is allocated: 3 % with expandable segments, about 10 % without. On a CPU the
temporaries of the backward pass count here too: glibc keeps freed blocks of up to 32 MiB, and the peak is of resident
memory."""
FIRST_STEP_BYTES = {"cpu": 70 * 2**20, "cuda": 0, "rocm": 0}
"""What the first step brings in on a CPU: generated matrix kernels, threads of autograd and of gloo."""


def predict_memory(work: Work, headroom: float) -> MemoryPrediction:
    """Return the predicted peak of the fullest rank; ``headroom`` is the share of memory to keep free."""
    terms = {
        "parameters": _parameters(work),
        "gathered": _gathered(work),
        "gradients": _gradients(work),
        "optimizer": _optimizer(work),
        "activations": activation_bytes(work),
        "loss": _loss(work),
        "communication": _communication(work),
        "framework": FRAMEWORK_BYTES[work.devices.backend],
    }
    allocated = sum(terms.values()) - terms["framework"]
    backend = work.devices.backend
    terms["fragmentation"] = int(allocated * FRAGMENTATION[backend]) + FIRST_STEP_BYTES[backend]
    total = sum(terms.values())
    return MemoryPrediction(
        rank=0,
        terms_bytes={name: terms[name] for name in MEMORY_TERMS},
        total_bytes=total,
        capacity_bytes=int(work.devices.memory_bytes * (1.0 - headroom)),
        fit_probability=fit_probability(total - terms["framework"], work.devices.memory_bytes - terms["framework"]),
    )


def fit_probability(predicted_bytes: float, capacity_bytes: float) -> float:
    """Return the probability that the true peak stays under the capacity, for a normal error of :data:`SIGMA`."""
    if capacity_bytes <= 0:
        return 0.0
    z = (capacity_bytes - predicted_bytes) / max(SIGMA * predicted_bytes, 1.0)
    return round(0.5 * (1.0 + erf(z / sqrt(2.0))), 6)


def _shards(work: Work) -> int:
    return work.layout.mesh.dp_shard if work.layout.zero else 1


def _parameters(work: Work) -> int:
    """Master weights, in shards from ZeRO-1 on: the runtime keeps the master copy sharded in every stage."""
    return work.master_bytes * -(-work.stage_elements // _shards(work))


def _gathered(work: Work) -> int:
    """Parameters gathered for the passes: all of them until ZeRO-2; in ZeRO-3 a group, the next one and the root.

    With one rank per shard axis too: fully_shard copies the master weights before it computes.
    """
    if work.layout.zero < 3:
        return work.compute_bytes * work.stage_elements
    *inner, root = work.gathered_groups
    pairs = [sum(pair) for pair in pairwise(inner)]
    return work.compute_bytes * (max(pairs, default=0) + root)


def _gradients(work: Work) -> int:
    """Whole gradients where they accumulate whole, else shards; the group under way is among the buffers."""
    trained = work.stage_elements * work.trained_share
    whole = _shards(work) == 1 or (work.layout.zero == 1 and work.layout.accumulation > 1)
    return int(work.master_bytes * trained / (1 if whole else _shards(work)))


def _optimizer(work: Work) -> int:
    """Two AdamW moments in the master type, in shards; none on the device when they live in host memory."""
    if work.layout.offload_optimizer == "cpu":
        return 0
    return int(2 * work.master_bytes * work.stage_elements * work.trained_share / _shards(work))


def _loss(work: Work) -> int:
    """Logits of one chunk in the compute type, the same in fp32 or wider, and their gradient."""
    logits = min(work.tokens_per_micro_batch * work.model.vocab // work.layout.mesh.tp, CHUNK_LOGITS)
    wide = max(work.compute_bytes, 4)
    narrow = work.compute_bytes if work.compute_bytes != wide else 0
    return logits * (2 * wide + narrow)


def _communication(work: Work) -> int:
    """Return the bytes of the largest group: gathered, as gradients, and as the reduction takes these."""
    if work.layout.mesh.world_size == 1:
        return 0
    return max(work.gathered_groups) * (2 * work.compute_bytes + work.master_bytes)
