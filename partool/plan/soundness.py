"""Contradictions between a plan's model and its other sections, as edits by hand make them."""

from __future__ import annotations

from collections.abc import Sequence

from partool.layout.mesh import all_have_rows, fill_nodes
from partool.layout.parameters import parameters
from partool.layout.tensor import Partition, by_name
from partool.plan.layout import Layout
from partool.plan.schedule import schedule_of
from partool.spec.model import ModelConfig


def model_contradiction(model: ModelConfig, sequence_length: int) -> str:
    """Return why no such model can be trained on such sequences, in words; empty if it can."""
    if model.heads % model.kv_heads:
        return f"model.heads is {model.heads}, no multiple of model.kv_heads: {model.kv_heads}"
    if model.position == "learned" and sequence_length > model.max_position:
        return f"training.sequence_length is {sequence_length}, model.max_position {model.max_position}"
    return ""


def experts_contradiction(model: ModelConfig, layout: Layout, per_node: int) -> str:
    """Return why ranks cannot share the model's experts as the layout says, in words; empty if they can.

    ``per_node`` is the number of ranks that the fast link joins.
    """
    undivided = next((number for number in model.expert_numbers if number % layout.expert), None)
    if layout.expert == 1:
        parts = layout.expert_tensor
        if layout.expert_exchange != "direct":
            return f"layout.expert_exchange is {layout.expert_exchange} with expert: 1, and must be direct"
        return "" if parts == 1 else f"layout.expert_tensor is {parts} with expert: 1, and must be 1"
    if (layout.expert_exchange == "padded") != (layout.expert_rank_capacity is not None):
        return f"layout.expert_rank_capacity is {layout.expert_rank_capacity} with {layout.expert_exchange}"
    if model.moe is None or undivided is not None:
        return f"layout.expert is {layout.expert}, the model has {undivided or 'no'} experts"
    mesh, ranks = layout.mesh, layout.expert_ranks
    sharers = mesh.dp_shard * mesh.cp * mesh.tp
    if layout.data.zero == 0:
        return f"layout.expert is {layout.expert}, which needs ZeRO 1, 2 or 3"
    for width in model.expert_widths:
        if not all_have_rows(width, layout.expert_tensor):
            return f"layout.expert_tensor is {layout.expert_tensor}, of an inner width of {width}"
    name = f"layout.expert is {layout.expert}"
    if layout.expert_tensor > 1:
        name += f" × expert_tensor {layout.expert_tensor}"
    if sharers % ranks:
        return f"{name}, of {sharers} ranks with one state"
    if layout.expert_exchange in ("direct", "padded") or fill_nodes(ranks, per_node):
        return ""
    return f"layout.expert_exchange is {layout.expert_exchange}, and {ranks} ranks do not fill nodes of {per_node}"


def partition_contradiction(model: ModelConfig, layout: Layout, partition: Sequence[Partition]) -> str:
    """Return the first parameter of partool's own decoder that the partition lacks or has otherwise; else empty."""
    if layout.tensor.degree == 1:
        return ""
    shapes = {info.name: info.shape for info in parameters(model)}
    rows = by_name(partition, shapes)
    for name, shape in shapes.items():
        if name not in rows:
            return f"partition lacks {name}, with layout.tensor.degree: {layout.tensor.degree}"
        if rows[name].shape != shape:
            return f"partition has {name} of {list(rows[name].shape)}, the model of {list(shape)}"
    return ""


def schedule_contradiction(layout: Layout) -> str:
    """Return why the schedule is not the planned one, in words; empty if it is, or if its hash was not recorded."""
    if layout.mesh.pp == 1 or not layout.derived.schedule_hash:
        return ""
    try:
        schedule_of(layout)
    except ValueError as error:
        return f"layout.pipeline: {error}"
    return ""
