"""What the equations are evaluated for: a model, machines, a training step and a layout, with the sizes they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from partool.layout.mesh import ranks_on_a_node
from partool.layout.parameters import ParameterInfo, groups, is_frozen
from partool.plan.types import Devices, Layout
from partool.spec.model import ModelConfig
from partool.spec.training import Precision

COMPUTE_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element of parameters and activations in forward and backward."""
MASTER_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4}
"""Bytes of one element of master weights, moments and reduced gradients."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, on what."""

    model: ModelConfig
    devices: Devices
    precision: Precision
    sequence_length: int
    global_batch: int
    steps: int
    frozen: tuple[str, ...] = ()
    headroom: float = 0.1

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in forward and backward."""
        return COMPUTE_BYTES[self.precision]

    @property
    def master_bytes(self) -> int:
        """Bytes of one element of the optimizer's weights and of reduced gradients."""
        return MASTER_BYTES[self.precision]


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Elements of one group of parameters that is gathered and reduced together, on one rank of the other axes."""

    whole: int
    """All elements, as gathered: the shards of all ranks, padded to equal rows."""
    shard: int
    """Elements of the largest shard (rank 0 of the shard axis)."""
    trained_whole: int
    trained_shard: int


def shard_ranks(layout: Layout) -> int:
    """Return the ranks that share one copy of the state: the shard axis, and the sequence axis folded into it."""
    return layout.mesh.dp_shard * layout.mesh.cp


@lru_cache(maxsize=512)
def group_sizes(
    model: ModelConfig, frozen: tuple[str, ...], stage: tuple[int, int], ranks: int, tensor: int, expert: int
) -> tuple[GroupSize, ...]:
    """Return the gathered groups of a pipeline stage: embeddings, each layer, and the root with final norm and head.

    With tied embeddings the embedding is gathered with the root, once. Rows of dimension 0 are cut as ``torch.chunk``
    cuts them, so a shard has ``ceil(rows / ranks)`` rows and gathered buffers are padded (FSDP2).
    """
    every = groups(model)
    first, last = stage
    found = [list(group) for group in every[1 + first : 1 + last]]
    ends_first, ends_last = first == 0, last == model.layers
    embedding = every[0] if ends_first or (ends_last and model.tied_embeddings) else []
    root = list(every[-1]) if ends_last else []
    if model.tied_embeddings:
        root = embedding + root
    elif embedding:
        found.insert(0, list(embedding))
    if root:
        found.append(root)
    return tuple(_group_size(group, frozen, ranks, tensor, expert) for group in found)


def sizes_of(work: Workload, layout: Layout, stage: int = 0) -> tuple[GroupSize, ...]:
    """Return :func:`group_sizes` of one stage of a layout."""
    bounds = layout.stages[stage]
    return group_sizes(work.model, work.frozen, bounds, shard_ranks(layout), layout.mesh.tp, layout.expert)


def on_node(work: Workload, layout: Layout, axis: str) -> int:
    """Return how many ranks of a group along the mesh axis share a node."""
    mesh = layout.mesh
    sizes = (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
    return ranks_on_a_node(axis, sizes, work.devices.per_node)


def _group_size(
    infos: Iterable[ParameterInfo], frozen: tuple[str, ...], ranks: int, tensor: int, expert: int
) -> GroupSize:
    whole = shard = trained_whole = trained_shard = 0
    for info in infos:
        rows = info.shape[0]
        row_elements = info.elements // rows
        if info.kind == "expert":
            rows = -(-rows // expert)
        elif len(info.shape) > 1 and info.kind != "router":
            rows = -(-rows // tensor)
        chunk = -(-rows // ranks) * row_elements
        whole += chunk * ranks
        shard += chunk
        if not is_frozen(info.name, frozen):
            trained_whole += chunk * ranks
            trained_shard += chunk
    return GroupSize(whole, shard, trained_whole, trained_shard)
