"""Bytes that a rank sends to the ranks that share its experts, if every expert gets the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from partool.cost.codec import encode
from partool.cost.time.pipeline import stages_of_ranks
from partool.cost.traffic.node_first import LevelBytes, NodeExchange
from partool.cost.traffic.node_visits import nodes_of_token
from partool.layout.mesh import shard_rows
from partool.layout.sequence import shares
from partool.layout.sequence import tokens as tokens_of
from partool.plan.layout import Layout
from partool.spec.model import ModelConfig
from partool.work.base import Workload

_COUNT_BYTES = 8
"""Bytes of the number of rows that a rank announces for one expert, or of a padded row's expert."""


def expert_bytes(job: Workload, layout: Layout) -> int:
    """Return the bytes that the busiest rank sends per step to the ranks that share its experts."""
    if job.model.moe is None or layout.expert == 1:
        return 0
    return max(_of_stages(job, layout, stages) for stages in stages_of_ranks(layout))


def _of_stages(job: Workload, layout: Layout, stages: Sequence[int]) -> int:
    layers = [layer for stage in stages for layer in range(*layout.pipeline.bounds[stage])]
    of_layer = {"direct": _of_layer, "padded": _padded}.get(layout.expert_exchange, _by_node)
    each = [
        of_layer(job.of_shape(job.model.expert_shape(layer)), layout, layout.recompute[layer])
        for layer in layers
        if job.model.is_moe_layer(layer)
    ]
    return layout.derived.accumulation * sum(each)


def _of_layer(job: Workload, layout: Layout, policy: str) -> int:
    """Return the bytes of one layer and micro-batch: rows and numbers of rows go out, results come back, twice.

    Each part of an expert gets the rows of the whole. A fully recomputed layer sends rows, numbers and results once
    more; other policies keep what has arrived.
    """
    moe = job.model.moe
    assert moe is not None, "a dense model"
    ranks, parts = layout.expert_ranks, layout.expert_tensor
    choices = layout.micro_batch * most_tokens(job.model, layout, job.sequence_length) * moe.top_k * parts
    rows = choices * (ranks - 1) // ranks
    kept = min(1.0, moe.capacity) if moe.capacity else 1.0
    passes = 3 if policy == "full" else 1 + job.backward
    numbers = max(passes - 1, 1) * _COUNT_BYTES * moe.experts * parts * (ranks - 1) // ranks
    return round(2 * passes * kept * rows) * job.model.hidden * job.compute_bytes + numbers


def _padded(job: Workload, layout: Layout, policy: str) -> int:
    """Return the bytes of one layer and micro-batch with rows of fixed number, which travel with their experts."""
    moe, ranks = job.model.moe, layout.expert_ranks
    assert moe is not None, "a dense model"
    assert layout.expert_rank_capacity is not None, "no padded exchange"
    choices = (
        layout.micro_batch * most_tokens(job.model, layout, job.sequence_length) * moe.top_k * layout.expert_tensor
    )
    rows = min(ceil(layout.expert_rank_capacity * choices / ranks), choices) * (ranks - 1)
    passes = 3 if policy == "full" else 1 + job.backward
    numbers = max(passes - 1, 1) * _COUNT_BYTES * rows
    return 2 * passes * rows * job.model.hidden * job.compute_bytes + numbers


def _by_node(job: Workload, layout: Layout, policy: str) -> int:
    return round(sum(level_bytes(job, layout, policy)))


def level_bytes(job: Workload, layout: Layout, policy: str) -> LevelBytes:
    """Return the bytes of one layer and micro-batch inside nodes and between them, if tokens cross to each node once.

    Experts are drawn at random (:mod:`partool.cost.traffic.node_visits`); each part of an expert gets the rows of the
    whole. A fully recomputed layer makes its forward exchanges twice.
    """
    moe, inside = job.model.moe, job.domain
    assert moe is not None, "a dense model"
    exchange = NodeExchange(
        tokens=layout.micro_batch * most_tokens(job.model, layout, job.sequence_length),
        choices=moe.top_k * layout.expert_tensor,
        experts=moe.experts * layout.expert_tensor,
        nodes=layout.expert_ranks // inside,
        inside=inside,
        visited=float(nodes_of_token(moe, encode(layout), inside)),
        row_bytes=job.model.hidden * job.compute_bytes,
        weight_bytes=max(4, job.compute_bytes),
        summed=layout.expert_exchange == "node_first_summed",
        kept=min(1.0, moe.capacity) if moe.capacity else 1.0,
    )
    forward = 1 + (policy == "full" and job.backward)
    return exchange.sent(forward, int(job.backward), forward)


def most_tokens(model: ModelConfig, layout: Layout, sequence_length: int) -> int:
    """Return the most tokens of a sequence that a rank routes: its share, of which tensor ranks route parts."""
    sequence, columns = layout.sequence, model.grid[1] if model.grid else 0
    spans_of_ranks = shares(sequence_length, sequence.degree, sequence.order, inner=sequence.ulysses, columns=columns)
    most = max(tokens_of(spans) for spans in spans_of_ranks)
    first = shard_rows(most, layout.tensor.degree, 0)
    return first.stop - first.start
