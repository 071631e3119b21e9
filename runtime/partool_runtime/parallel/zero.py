"""ZeRO (Rajbhandari et al., arXiv 1910.02054) and hybrid sharding on torch's ``fully_shard``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from partool.plan.layout import Layout
from partool.spec.training import Precision
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.stages import HfParts
from partool_runtime.mesh import MeshAxis, Ranks
from partool_runtime.model import AnyDecoder, Decoder, DecoderParts
from partool_runtime.model.moe import Experts
from partool_runtime.model.routing import Router
from partool_runtime.parallel.grad_sync import GradSync
from partool_runtime.parallel.host_exchange import HostSum, ParameterGather, ReplicaSum, ScatterSum
from partool_runtime.parallel.leaves import fill_missing, find_leaves, join_graph
from partool_runtime.parallel.persistent import Persistent
from partool_runtime.parallel.pipeline.sync import Unit
from partool_runtime.precision import COMPUTE_DTYPE
from partool_runtime.torch_internals.fsdp import gather_in_background, gather_in_order, sum_replicas_by
from partool_runtime.torch_internals.group_gather import gather_otherwise
from partool_runtime.torch_internals.in_place import use_in_place
from partool_runtime.torch_internals.tensors import without_modes
from partool_runtime.usermodel.model import ModuleDecoder

WholeModel = Decoder | HfDecoder | ModuleDecoder
Layer = Sequence[FSDPModule]
"""Units that are gathered for one layer: the layer's unit, then units within the layer, in the order of use."""


def prefetch(layers: Sequence[Layer], root: FSDPModule, depth: int, *, forward: bool = True, skipped: int = 0) -> None:
    """Gather parameters ``depth`` layers ahead in backward passes and, if ``forward``, also in forward passes.

    By default FSDP2 prefetches one unit in backward passes, in the order of the latest forward passes; in a pipeline
    these passes belong to other micro-batches than the backward pass. A unit that is set to prefetch itself prefetches
    nothing, since it is gathered already. The root's own parameters are gathered when the forward pass begins, although
    the forward pass uses them last.

    Passes without gradients skip the last ``skipped`` layers, which no layer before gathers: what a pass gathered and
    did not use would still count as gathered when weights have changed.
    """
    for index, layer in enumerate(layers):
        behind = _flat(reversed(layers[max(0, index - depth) : index])) if depth else []
        last = len(layers) - (skipped if index < len(layers) - skipped else 0)
        ahead = _flat(layers[index + 1 : min(index + 1 + depth, last)])
        first, inner = layer[0], list(layer[1:])
        first.set_modules_to_backward_prefetch([*(inner[::-1] if depth else ()), *behind] or [first])
        for unit in inner:
            unit.set_modules_to_backward_prefetch([unit])
        if forward:
            first.set_modules_to_forward_prefetch([*(inner if depth else ()), *ahead])
    root.set_modules_to_backward_prefetch(
        _flat(reversed(layers[len(layers) - depth :])) if depth and layers else [root]
    )
    if forward:
        root.set_modules_to_forward_prefetch(_flat(layers[: min(depth, len(layers) - skipped)]))


def _flat(layers: object) -> list[FSDPModule]:
    return [unit for layer in layers for unit in layer]  # type: ignore[attr-defined]


def shard(model: WholeModel, *, layout: Layout, precision: Precision, ranks: Ranks) -> GradSync:
    """Shard parameters over the shard axis, in place; the model may still be on the meta device.

    Every ZeRO stage shards master weights and moments. The stages differ in when parameters are gathered and gradients
    are reduced, which :class:`GradSync` controls. With ZeRO-0 the shard axis has one rank: nothing is gathered,
    and gradients are all-reduced over the replicas once per step. Gradients are summed, not averaged: the loss is
    divided by the step's tokens over all ranks.

    Raises :class:`ConfigurationError` (PT464) for a leaf pattern that matches no module, or matches an unsuitable one.
    """
    policy = _policy(precision, reduce_in_compute_dtype=grads_stay_16bit(layout))
    sums = _host_sums(layout, ranks)
    leaves = _leaves(model, layout, everywhere=True)
    every = model.groups()
    groups, shared = _separate_groups(every), _shared_parameters(every)
    frozen = frozen_whole(model, layout)
    skipped = model.config.predictions if isinstance(model, Decoder) else 0
    sharding = _Sharding(layout, _mesh(ranks), policy, leaves, sums, _expert_mesh(ranks), shared, frozen, skipped)
    layers = [sharding.layer(group) for group in groups if _parameters(group) - shared - sharding.frozen]
    # The root holds the modules that run last, whose parameters the backward pass needs at once.
    root = sharding.root(model, layers)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return GradSync(
        modules,
        zero=layout.data.zero,
        replicas=ranks.replicate.size,
        persistent=sharding.tune(layers, root),
        reduce_each=layout.offload.optimizer != "none" and reduces_alone(layout),
        overlapped=sums if _overlaps(layout, ranks) else None,
    )


def shard_stages(parts: DecoderParts | HfParts, *, layout: Layout, precision: Precision, ranks: Ranks) -> list[Unit]:
    """Shard a pipeline rank's parameters over the shard axis, in place; every stage is sharded separately.

    An embedding that two stages of the rank share is also gathered and reduced separately. Raises
    :class:`ConfigurationError` (PT464) for a leaf pattern that names a module which cannot be a leaf.
    """
    leaves = _leaves(parts, layout, everywhere=False)
    # FSDP2 itself sums over replicas here, because a pipeline delays that sum by ``set_requires_all_reduce``.
    sums = _host_sums(layout, ranks) if layout.data.zero or ranks.exchanges is not None else None
    frozen = frozen_whole(parts, layout)
    sharding = _Sharding(layout, _mesh(ranks), _policy(precision), leaves, sums, _expert_mesh(ranks), frozen=frozen)
    units = []
    for number, stage in parts.stages.items():
        layers = [sharding.layer(group) for group in stage.groups() if _parameters(group) - frozen]
        root = sharding.root(stage, layers)
        units.append(Unit(root, frozenset({number}), sharding.tune(layers, root, in_turns=True)))
    if parts.shared is not None:
        shared = sharding.root(parts.shared, [])
        persistent = sharding.tune([], shared, in_turns=True)
        units.append(Unit(shared, frozenset({min(parts.stages), max(parts.stages)}), persistent))
    return units


@dataclass(frozen=True)
class _Sharding:
    """Turns modules into FSDP2 units, inner ones first, and sets how they are gathered."""

    layout: Layout
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    leaves: dict[str, nn.Module]
    sums: HostSum | None
    """Object that sums gradients over CPU ranks; None where FSDP2 sums gradients."""
    experts: DeviceMesh | None = None
    """The ranks with the same experts; None if experts are sharded as the rest of their layer is."""
    shared: frozenset[nn.Parameter] = frozenset()
    """Parameters that several groups have in common. They belong to the root, which stays gathered while all of these
    groups run: a parameter is managed by one unit, which is released after its own forward pass."""
    frozen: frozenset[nn.Parameter] = frozenset()
    """Frozen parameters that stay whole on each rank (:func:`frozen_whole`)."""
    skipped: int = 0
    """Number of last layers that passes without gradients skip: those of modules for further tokens."""

    def layer(self, group: Sequence[nn.Module]) -> Layer:
        """Shard a group of modules as one unit, and each leaf within it as a separate unit."""
        inner = self._inner(group)
        return [self._unit(group, release=self.layout.data.zero == 3, apart=self.shared), *inner]

    def root(self, module: nn.Module, layers: Sequence[Layer]) -> FSDPModule:
        """Shard a module's remaining parameters, which stay gathered between forward and backward pass."""
        self._inner([module])
        units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        shared_in_units = _parameters(cast("list[nn.Module]", units)) & self.shared
        # All ranks need the same order, which sets do not have.
        shared_in_units -= self.frozen
        with _among_own(module, [parameter for parameter in module.parameters() if parameter in shared_in_units]):
            root = self._unit([module], release=False)
        for each in module.modules():
            if isinstance(each, FSDPModule):
                self._sum(each)
        return root

    def _sum(self, unit: FSDPModule) -> None:
        """Make FSDP2 sum a unit's gradients instead of averaging them, and set the collective that sums."""
        # Without this, FSDP2 uses a pre-multiplied sum for a factor of 1, which gloo lacks.
        unit.set_force_sum_reduction_for_comms(True)
        if isinstance(self.sums, ReplicaSum):
            sum_replicas_by(unit, self.sums)
        elif self._mesh_of(unit).size() > 1:  # for one rank FSDP2 would divide by 1, in a copy of all gradients
            unit.set_gradient_divide_factor(1.0)
        if isinstance(self.sums, ScatterSum):
            unit.set_custom_reduce_scatter(cast(Any, self.sums))  # the argument's type has no public name

    def tune(self, layers: Sequence[Layer], root: FSDPModule, *, in_turns: bool = False) -> Persistent:
        """Set how the units under a root are gathered, and how far ahead.

        ``in_turns`` means that passes of other micro-batches run between a forward pass and its backward pass.
        """
        units = [module for module in cast(nn.Module, root).modules() if isinstance(module, FSDPModule)]
        if self.layout.offload.optimizer == "none" and self.layout.offload.parameters == "none":
            for unit in units:
                use_in_place(unit)
        apart = self.layout.data.gather == "sequential"
        most_kept = self.layout.data.persistent if self.layout.data.zero == 3 else 0
        gathers = []
        for unit in units if apart or most_kept else ():
            # Without prefetching, concurrent messages gain nothing.
            in_turn = self.layout.data.prefetch == 0
            gathers += gather_otherwise(unit, apart=apart, in_turn=in_turn, most_kept=most_kept)
        in_background = self._in_background(units) if not (in_turns or gathers) else False
        if self.layout.data.zero == 3:
            depth = self.layout.data.prefetch
            # On a GPU FSDP2 gathers on a separate stream, and by default prefetches one unit.
            own_way = depth == 1 and not apart and not self.leaves and not in_background
            if not own_way or in_turns:
                prefetch(layers, root, depth, forward=not own_way, skipped=self.skipped)
            for unit in units if depth == 0 else ():
                gather_in_order(unit)
        elif in_background:
            prefetch(layers, root, 1, skipped=self.skipped)
        return Persistent(gathers)

    def _in_background(self, units: Sequence[FSDPModule]) -> bool:
        """If possible, let CPUs gather units while other units compute; return whether it is possible."""
        ahead = self.layout.data.prefetch > 0 or self.layout.data.zero < 3
        if not isinstance(self.sums, ScatterSum) or not ahead or self.layout.offload.parameters != "none":
            return False
        for unit in units:
            unit.set_custom_all_gather(cast(Any, ParameterGather()))
            gather_in_background(unit)
        return True

    def _inner(self, group: Sequence[nn.Module]) -> list[FSDPModule]:
        within = [leaf for module in group for leaf in module.modules() if leaf is not module]
        leaves = {id(leaf): leaf for leaf in self.leaves.values()}
        if self.experts is not None:
            leaves |= {id(module): module for module in within if isinstance(module, Experts)}
        return [
            self._unit([module], release=self.layout.data.zero == 3, apart=self.shared)
            for module in within
            if id(module) in leaves and not isinstance(module, FSDPModule) and _parameters([module]) - self.frozen
        ]

    def _mesh_of(self, module: object) -> DeviceMesh:
        return self.experts if self.experts is not None and isinstance(module, Experts) else self.mesh

    def _unit(
        self, group: Sequence[nn.Module], *, release: bool, apart: frozenset[nn.Parameter] = frozenset()
    ) -> FSDPModule:
        """Make a group of modules a unit, without the parameters ``apart``."""
        leaf = any(module is each for module in group for each in self.leaves.values())
        if leaf:
            join_graph(group[0])
        # FSDP2 cannot reduce a gradient without elements, which a tensor rank without heads would have.
        empty = {p for module in group for p in module.parameters() if p.numel() == 0}
        # Selection biases stay in float32 on all ranks, which change them alike.
        routers = [each for module in group for each in module.modules() if isinstance(each, Router)]
        ignored = apart | empty | self.frozen | {router.bias for router in routers if router.bias is not None}
        unit = fully_shard(
            list(group),
            mesh=self._mesh_of(group[0]),
            reshard_after_forward=release,
            mp_policy=self.policy,
            ignored_params=set(ignored) or None,
        )[0]
        if leaf:
            fill_missing(unit)
        return unit


def frozen_whole(model: nn.Module, layout: Layout) -> frozenset[nn.Parameter]:
    """Return the frozen parameters that ranks do not shard: all of them below ZeRO-3, which gathers nothing else for.

    Below ZeRO-3 parameters exist whole in each step, and shards of frozen ones would be a second copy: they have no
    masters and no gradients. Parameters in host memory are gathered from there.
    """
    if layout.data.zero == 3 or layout.offload.parameters != "none":
        return frozenset()
    return frozenset(p for p in model.parameters() if not p.requires_grad)


def _leaves(model: AnyDecoder, layout: Layout, *, everywhere: bool) -> dict[str, nn.Module]:
    """Return the leaf modules by name; ``everywhere`` means that this rank holds the whole model."""
    leaves = find_leaves(model, layout.data.leaves)
    for pattern in layout.data.leaves if everywhere else ():
        if not find_leaves(model, [pattern]):
            raise ConfigurationError("PT464", f"parallel.data.leaves: no module is called {pattern!r}", _LEAF_HELP)
    for name, module in leaves.items():
        if type(module).forward is nn.Module.forward:
            message = f"parallel.data.leaves: {name!r} is a container that is never called itself"
            raise ConfigurationError("PT464", message, _LEAF_HELP)
    return leaves


_LEAF_HELP = "name the module inside of a layer that calls the experts, such as '*.experts' or '*.mlp'"


def _host_sums(layout: Layout, ranks: Ranks) -> HostSum | None:
    """Return the object that sums gradients over CPU ranks; None where FSDP2 sums all gradients.

    FSDP2 sums all gradients on GPUs, unless the optimizer averages only those of some steps. On CPUs FSDP2 sums
    gradients only over replicas, and with ZeRO-0 it sums none.
    """
    if ranks.device.type != "cpu" and ranks.exchanges is None:
        return None
    if ranks.shard.size > 1:
        return ScatterSum()
    # Other stages delay the sum over replicas to the last micro-batch, by ``set_requires_all_reduce``.
    alone = layout.data.zero == 0 and ranks.replicate.size > 1
    replicas = ranks.groups.of(ranks.replicate.parts)
    return ReplicaSum(replicas, ranks.exchanges) if alone and replicas is not None else None


def _overlaps(layout: Layout, ranks: Ranks) -> bool:
    """Return whether sums may stay in flight; False if shards have replicas or the optimizer is in host memory."""
    return (ranks.replicate.size == 1 or layout.data.zero == 0) and layout.offload.optimizer == "none"


def _mesh(ranks: Ranks) -> DeviceMesh:
    """Return the mesh for FSDP2: an axis over the ranks of one copy of the state, and one over copies if there are any.

    A collective of all ranks of the world. torch's own constructor of meshes would open groups of one rank, too.
    """
    return _mesh_over(ranks, ranks.shard, ranks.replicate)


def _expert_mesh(ranks: Ranks) -> DeviceMesh | None:
    """Return the mesh of :func:`_mesh` for the ranks with the same experts; None if ranks share no experts."""
    shard, replicate = ranks.expert_shard, ranks.expert_replicate
    return None if shard is None or replicate is None else _mesh_over(ranks, shard, replicate)


def _mesh_over(ranks: Ranks, shard: MeshAxis, replicate: MeshAxis) -> DeviceMesh:
    shards, copies = (ranks.groups.of(axis.parts) for axis in (shard, replicate))
    shards = shards or ranks.groups.alone()
    kind = ranks.device.type
    with without_modes():  # a mesh reads the tensor of its ranks
        if copies is None:
            return DeviceMesh.from_group(shards, kind, mesh_dim_names=("dp_shard",))
        copy_of = {rank: part for part in shard.parts for rank in part}
        numbers = torch.tensor([copy_of[rank] for rank in replicate.mine])
        return DeviceMesh.from_group([copies, shards], kind, numbers, mesh_dim_names=("dp_replicate", "dp_shard"))


def _policy(precision: Precision, *, reduce_in_compute_dtype: bool = False) -> MixedPrecisionPolicy:
    """Return the data types that FSDP2 uses for a precision.

    ``reduce_in_compute_dtype`` keeps gradients in the type of computation, since no gradients are summed.
    """
    if precision in ("fp32", "fp64"):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    reduced = None if reduce_in_compute_dtype else torch.float32
    return MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE[precision], reduce_dtype=reduced, cast_forward_inputs=False)


def reduces_alone(layout: Layout) -> bool:
    """Return True if the layout has one data rank, one context rank and one pipeline rank."""
    mesh = layout.mesh
    return mesh.dp * mesh.cp == 1 and mesh.pp == 1


def grads_stay_16bit(layout: Layout) -> bool:
    """Return True if gradients reach the host in the type of computation, since no other rank or pass adds to them."""
    alone = reduces_alone(layout) and layout.mesh.tp == 1
    return layout.offload.optimizer != "none" and layout.offload.gradients == "bf16" and alone


def _separate_groups(groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Return the groups to gather separately. The last group and groups sharing its parameters stay in the root."""
    with_root = _parameters(groups[-1])
    separate = []
    for group in groups[:-1]:
        parameters = _parameters(group)
        if parameters and not parameters & with_root:
            separate.append(list(group))
    return separate


def _parameters(group: Sequence[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in group for parameter in module.parameters()}


def _shared_parameters(groups: Sequence[Sequence[nn.Module]]) -> frozenset[nn.Parameter]:
    """Return the parameters that more than one group has."""
    users = Counter(parameter for group in groups for parameter in _parameters(group))
    return frozenset(parameter for parameter, count in users.items() if count > 1)


@contextmanager
def _among_own(module: nn.Module, parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Let a module have parameters of its children as its own within the context, too.

    FSDP2 gives a unit the parameters that its modules have outside of inner units, and sets gathered ones wherever they
    are used.
    """
    holder = nn.ParameterList(parameters)
    module.add_module(_HOLDER, holder)
    try:
        yield
    finally:
        delattr(module, _HOLDER)


_HOLDER = "_shared_parameters"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the sharded parameters that need gradients, by name. Call it before the first forward pass.

    After the first forward pass a module may hold gathered parameters instead of sharded parameters.
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
