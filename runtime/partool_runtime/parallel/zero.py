"""ZeRO (Rajbhandari et al., arXiv 1910.02054) and hybrid sharding on torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from partool.spec.parallel import ZeroStage
from partool.spec.training import Precision
from partool_runtime.mesh import Ranks
from partool_runtime.model import Decoder, DecoderParts
from partool_runtime.parallel.grad_sync import GradSync
from partool_runtime.parallel.pipeline.sync import Unit
from partool_runtime.precision import COMPUTE_DTYPE


def shard(model: Decoder, *, zero: ZeroStage, precision: Precision, ranks: Ranks) -> GradSync:
    """Spread parameters over the shard axis, in place; the model may still be on the meta device.

    Every stage keeps master weights and moments in shards. The stages differ in when parameters are gathered and
    gradients are reduced, which :class:`GradSync` switches. ZeRO-0 is the case of one rank per shard axis: nothing is
    gathered, and gradients are all-reduced over the replicas once a step. Gradients are summed, not averaged: the loss
    is divided by the step's tokens over all ranks.
    """
    mesh = _mesh(ranks)
    policy = _policy(precision)
    for group in _own_groups(model.groups()):
        fully_shard(group, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
    # The root holds what runs last, which the backward pass needs at once.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        _sum_gradients(module)
    return GradSync(modules, zero=zero, replicas=ranks.replicas)


def shard_stages(parts: DecoderParts, *, zero: ZeroStage, precision: Precision, ranks: Ranks) -> list[Unit]:
    """Spread a pipeline rank's parameters over the shard axis, in place; every stage is sharded on its own.

    An embedding that two stages of the rank share is gathered and reduced on its own, too.
    """
    mesh, policy = _mesh(ranks), _policy(precision)
    units = []
    for number, stage in parts.stages.items():
        groups = stage.groups()
        for group in groups:
            fully_shard(group, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
        root = fully_shard(stage, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        if zero == 3:
            _prefetch_backward([group[0] for group in groups], root)
        units.append(Unit(root, frozenset({number})))
    if parts.shared is not None:
        shared = fully_shard(parts.shared, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        units.append(Unit(shared, frozenset({min(parts.stages), max(parts.stages)})))
    for unit in units:
        for module in unit.modules:
            _sum_gradients(module)
    return units


def _prefetch_backward(modules: Sequence[nn.Module], root: FSDPModule) -> None:
    """Gather each module while the next one's backward pass runs.

    Left alone FSDP2 goes by the order of forward passes, in which other micro-batches lie between a forward pass and
    its backward pass. The first one has none before it; it names itself, which is gathered already.
    """
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    for before, module in zip([sharded[0], *sharded], [*sharded, root], strict=True):
        module.set_modules_to_backward_prefetch([before])


def _mesh(ranks: Ranks) -> DeviceMesh:
    return ranks.state if ranks.replicas > 1 else ranks.state["dp_shard"]


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    if precision in ("fp32", "fp64"):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _own_groups(groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Return the groups to be gathered on their own; one that shares a parameter with the last stays in the root."""
    with_root = {id(parameter) for module in groups[-1] for parameter in module.parameters()}
    own = []
    for group in groups[:-1]:
        parameters = {id(parameter) for module in group for parameter in module.parameters()}
        if parameters and not parameters & with_root:
            own.append(list(group))
    return own


def _sum_gradients(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(1.0)
    # Without this, a factor of 1 is a pre-multiplied sum, which gloo lacks.
    module.set_force_sum_reduction_for_comms(True)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the sharded parameters that need gradients, by name. Call it before the first forward pass.

    Afterwards a module may hold gathered parameters in their place.
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
