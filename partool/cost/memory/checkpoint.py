"""Bytes of a checkpoint that one node writes."""

from __future__ import annotations

import math

from partool.cost.case import MASTER_BYTES
from partool.cost.optimizer import moments_of
from partool.layout.parameters import count, parameters
from partool.plan.types import Plan
from partool.strategies.optimizers import OPTIMIZERS


def node_checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of weights and moments that the node with the largest part writes for a checkpoint.

    Every value is written once; ranks that hold copies of it share the work. State in files is in no memory term: all
    nodes then count alike.
    """
    if plan.layout.offload.optimizer == "nvme":
        element = MASTER_BYTES[plan.training.precision] * (1 + moments_of(plan.optimizer))
        return math.ceil(count(parameters(plan.model)) * element / plan.devices.nodes)
    mesh = plan.layout.mesh
    copies = mesh.dp_replicate * (1 if plan.layout.data.zero else mesh.dp_shard * mesh.cp)
    if OPTIMIZERS[plan.optimizer.name].whole_steps:  # what compression left out differs between copies of the weights
        copies = 1
    return math.ceil(_state_bytes(plan) * plan.devices.per_node / copies)


def _state_bytes(plan: Plan) -> int:
    """Return the bytes of weights and moments of the rank that holds most of them."""
    memory = plan.prediction.memory
    if plan.layout.offload.optimizer == "cpu":  # the device's copy of the weights is not saved
        host = memory.host_terms_bytes
        return host.get("masters", 0) + host.get("moments", 0) + memory.terms_bytes.get("optimizer", 0)
    ranks = [memory.terms_bytes, *(rank.terms_bytes for rank in memory.ranks)]
    return max(terms.get("parameters", 0) + terms.get("optimizer", 0) for terms in ranks)
