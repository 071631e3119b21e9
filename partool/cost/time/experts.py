"""Seconds of a layer's experts, and of sending tokens to them and back."""

from __future__ import annotations

import numpy as np

from partool.catalog.silicon.experts import Sizes
from partool.cost import collective, tensor_shares
from partool.cost.case import BY_NODE, NODE_FIRST_SUMMED, Column, Layouts, among
from partool.cost.silicon import experts
from partool.cost.time.gemm import matmul_s
from partool.cost.traffic.expert_rows import rows_sent
from partool.cost.traffic.messages import tokens
from partool.cost.traffic.node_visits import nodes_of_token
from partool.work.base import Workload

_GROUPED_SHARE = 0.85
"""Rate of a CPU's products of experts relative to one dense product of the same size: an assumption. Devices have
measured curves (:mod:`partool.cost.silicon.experts`)."""


def expert_sizes(job: Workload, layouts: Layouts, rows: Column) -> Sizes | None:
    """Return the experts on a rank and the rows of each; None for a model without experts."""
    model, moe = job.model, job.model.moe
    if moe is None:
        return None
    local = np.maximum(moe.experts / layouts.ep, 1.0)
    # Ranks that hold parts of the same experts all get these experts' tokens.
    each = job.load * rows * moe.top_k * layouts.etp / local
    # Experts are sharded by tensor parallelism only where no ranks are dedicated to sharing them.
    width = tensor_shares.width(moe.ffn_hidden, np.where(layouts.ep > 1, layouts.etp, tensor_shares.outer(layouts)))
    each = np.where(layouts.ep > 1, each / layouts.tp, each)
    return Sizes(each, local, model.hidden, width, model.gated)


def experts_s(job: Workload, layouts: Layouts, rows: Column) -> tuple[Column, Column, Column]:
    """Return the seconds of a layer's experts: forward, gradients of their inputs, gradients of their weights.

    Of devices they contain the activation and the copies of rows, of a CPU the products only.
    """
    sizes = expert_sizes(job, layouts, rows)
    if sizes is None:
        return 0.0, 0.0, 0.0
    if job.devices.backend != "cpu":
        forward = experts.layer_s(job, sizes)
        return forward, 0.5 * experts.BACKWARD * forward, 0.5 * experts.BACKWARD * forward
    inputs: Column = 0.0
    weights: Column = 0.0
    forward = 0.0
    pairs = (((1 + sizes.gated) * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner))
    for n, k in pairs:
        forward = forward + matmul_s(job, sizes.each, n, k, batch=sizes.experts) / _GROUPED_SHARE
        inputs = inputs + matmul_s(job, sizes.each, k, n, batch=sizes.experts) / _GROUPED_SHARE
        weights = weights + matmul_s(job, n, k, sizes.each, batch=sizes.experts) / _GROUPED_SHARE
    return forward, inputs, weights


def exchange_s(job: Workload, layouts: Layouts) -> Column:
    """Return the seconds to send tokens to experts and back; each token goes to all parts of ``top_k`` experts.

    Where tokens cross to each node once, both levels follow one another on each way. The backward pass sends as much as
    the forward pass, in the other order.
    """
    if job.model.moe is None:
        return 0.0
    rows = tokens(job, layouts) / layouts.tp
    ranks = collective.axis_group(job, layouts, "ep")
    visits = job.model.moe.top_k * layouts.etp
    token_bytes = rows_sent(job, layouts) * rows * job.model.hidden * job.compute_bytes
    if job.stack.sends_once:
        return collective.token_exchange_s(job, token_bytes, ranks, visits)
    direct = 2.0 * collective.all_to_all_s(job, visits * token_bytes, ranks)
    by_node = among(layouts.expert_exchange, BY_NODE)
    if not np.any(by_node):
        return direct
    return np.where(by_node, _node_first_s(job, layouts, token_bytes, visits), direct)


def _node_first_s(job: Workload, layouts: Layouts, token_bytes: Column, visits: Column) -> Column:
    """Return the seconds of an exchange by which tokens cross to each node once.

    A rail is a group of one rank per node, whose members send one another all but the rows of their nodes.
    """
    moe, nodes = job.model.moe, np.maximum(layouts.expert_ranks // job.domain, 1)
    assert moe is not None, "a dense model"
    rail = collective.RankGroup(nodes, 1, 1)
    crossing_bytes = token_bytes * nodes_of_token(moe, layouts, job.domain)
    summed = np.asarray(layouts.expert_exchange) == NODE_FIRST_SUMMED
    back_bytes = np.where(summed, crossing_bytes, visits * token_bytes)
    inside_s = collective.all_to_all_s(job, visits * token_bytes, collective.group(job, job.domain, 1))
    across_s = (collective.all_to_all_s(job, sent_bytes, rail) for sent_bytes in (crossing_bytes, back_bytes))
    return sum(across_s) + 2.0 * inside_s
