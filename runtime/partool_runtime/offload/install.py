"""Creates the optimizer for a plan and a prepared model; its state is on the device or in host memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from partool.plan.types import Plan
from partool.strategies.optimizers import OPTIMIZERS
from partool_runtime.hf.model import HfDecoder
from partool_runtime.mesh import Ranks
from partool_runtime.model import Decoder
from partool_runtime.offload.optimizer import HostOptimizer, HostSetting
from partool_runtime.optim.average import MovingAverage
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.optim.muon import open_matrices
from partool_runtime.optim.one_bit import OneBitOptimizer
from partool_runtime.optim.types import Optimizer
from partool_runtime.optim.whole_norms import open_norms
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.precision import COMPUTE_DTYPE, MASTER_DTYPE

if TYPE_CHECKING:
    from partool_runtime.preparation import Prepared


def open_optimizer(plan: Plan, prepared: Prepared, ranks: Ranks) -> Optimizer:
    """Return the plan's optimizer for a rank's part of the model. The part must have memory and must not have run yet.

    The optimizer's state is empty: fill the model, or ``masters()`` and ``state()``, and call ``loaded()``. An
    optimizer in host memory takes gradients during backward passes. It allocates all of its memory in this call, since
    pinning memory waits for the device, and the device must not wait for another rank at the same time.
    """
    if plan.layout.offload.optimizer == "none":
        # ``kernels.fused`` applies to accelerators only; on a CPU only the mode selects the compiled pass.
        ours = ranks.device.type == "cpu" or plan.optimizer.name in plan.layout.derived.fused
        kernels, model = plan.kernels.mode if ours else "torch", prepared.model
        trained, record = trained_parameters(model), OPTIMIZERS[plan.optimizer.name]
        norms = open_norms(plan, model, trained, ranks) if record.norms else None
        if ranks.exchanges is not None:
            return OneBitOptimizer(
                trained,
                plan.optimizer,
                model.copies,
                exchanges=ranks.exchanges,
                group=ranks.groups.of(ranks.replicate.parts),
                placements=model.placements,
                kernels=kernels,
                norms=norms,
            )
        matrices = open_matrices(plan, trained, ranks) if record.rest else None
        ema = plan.training.ema
        return DeviceOptimizer(
            trained,
            plan.optimizer,
            model.copies,
            kernels=kernels,
            matrices=matrices,
            norms=norms,
            average=None if ema is None else MovingAverage(trained, ema),
        )
    optimizer = _on_host(plan, prepared, ranks)
    prepared.memory.freeze()
    return optimizer


def _on_host(plan: Plan, prepared: Prepared, ranks: Ranks) -> HostOptimizer:
    model, sync = prepared.model, prepared.sync
    trained = trained_parameters(model)
    after_passes = frozenset(trained) if sync is None else prepared.grads_ready_after_passes
    order = list(trained) if sync is None else expected(cast("Decoder | HfDecoder", model), trained, after_passes)
    comes_each = sync is not None and sync.comes_each and plan.layout.derived.accumulation > 1
    layout = plan.layout
    host = prepared.host
    pool, note = host.pool(layout.offload.threads, plan.devices.per_node, ranks.device)
    setting = HostSetting(
        layout.offload,
        ranks.device,
        MASTER_DTYPE[plan.training.precision],
        COMPUTE_DTYPE[plan.training.precision],
        accumulates=comes_each,
        memory=prepared.memory,
        shards=prepared.shards,
        pool=pool,
        owner=f"rank {ranks.rank}",
        mode=plan.kernels.mode,
        lanes=host.lanes,
        worker=host.worker,
        state_file=host.state_file,
    )
    optimizer = HostOptimizer({name: trained[name] for name in order}, plan.optimizer, model.copies, setting)
    optimizer.notes += note
    for name, parameter in trained.items():
        if name not in after_passes:
            parameter.register_post_accumulate_grad_hook(partial(_leave, optimizer, name))  # type: ignore[no-untyped-call]
    if comes_each and sync is not None:
        sync.tell(lambda last: optimizer.micro_batch(last=last))
    return optimizer


def _leave(optimizer: HostOptimizer, name: str, parameter: torch.Tensor) -> None:
    """Pass a gradient to the optimizer, so that its device memory is freed as soon as it is copied."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        optimizer.arrive(name, gradient)


def expected(
    model: Decoder | HfDecoder, trained: Mapping[str, nn.Parameter], after_passes: Collection[str]
) -> list[str]:
    """Return the names of parameters in the order in which their gradients become complete.

    Layers are reduced from the last to the first. The root (the modules that run last) and the modules that run before
    all layers are reduced at the end of the backward pass, since no gradient flows into their inputs. Parameters in
    ``after_passes``, whose gradients are collected after all passes, come last.
    """
    groups, layers = model.groups(), len(model.layers)
    before, blocks, root = groups[: -layers - 1], groups[-layers - 1 : -1], groups[-1]
    names = {id(parameter): name for name, parameter in trained.items()}
    units = [*reversed(blocks), root, *before]
    reduced = (names.get(id(p)) for unit in units for module in unit for p in module.parameters())
    ordered = dict.fromkeys(name for name in reduced if name is not None and name not in after_passes)
    return [*ordered, *(name for name in trained if name not in ordered)]
