"""The optimizer whose state is in host memory: names, groups and hyper-parameters around the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from partool.plan.types import HostWork
from partool.spec.training import OptimizerSpec
from partool_kernels.host import MOMENTS, Pool, Rule
from partool_runtime.offload.buckets import fill_buckets, places
from partool_runtime.offload.engine import Buffers, Engine, Target
from partool_runtime.offload.lanes import open_lanes
from partool_runtime.offload.store import MemoryStore
from partool_runtime.optim.grad_norm import LocalSums, Mode, host_sums
from partool_runtime.torch_internals import local, placed_like


class HostOptimizer:
    """AdamW in host memory; see :class:`partool_runtime.optim.types.Optimizer`.

    ``parameters`` are sharded, on the device and in the type of computation, in the order in which their gradients are
    expected. Masters are of ``master`` type. ``accumulates`` says that gradients come once per micro-batch, of several.
    ``frozen`` parameters have masters, too: what is read in and saved is not what a narrow type has left of it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimizerSpec,
        copies: Collection[str] = (),
        *,
        frozen: Mapping[str, nn.Parameter] | None = None,
        work: HostWork,
        master: torch.dtype,
        accumulates: bool,
        pool: Pool | None = None,
        mode: Mode = "auto",
    ) -> None:
        self._parameters, self._spec, self._copies = dict(parameters), spec, frozenset(copies)
        self._device = next(iter(parameters.values())).device
        self._frozen = dict(frozen or {})
        self._kept = {name: torch.zeros(local(p).shape, dtype=master) for name, p in self._frozen.items()}
        held = {name: p for name, p in parameters.items() if local(p).numel() > 0}
        wire = master if work.gradients == "master" else next(iter(parameters.values())).dtype
        most = max(2**16, work.bucket_bytes // wire.itemsize)
        self._buckets = fill_buckets(((name, local(p).numel()) for name, p in held.items()), most)
        self._places = places(self._buckets)
        moments = torch.bfloat16 if work.moments == "bf16" else master
        self._store = MemoryStore(self._buckets, (master, *(moments for _ in MOMENTS["adamw"])))
        self.updates = 0
        buffers = Buffers(
            self._buckets,
            gradients=wire,
            weights=next(iter(parameters.values())).dtype,
            totals=master if accumulates else None,
            pinned=self._device.type == "cuda",
        )
        targets = {name: Target(local(p.detach()).view(-1), int(p.ndim < 2)) for name, p in held.items()}
        self._engine = Engine(
            self._buckets,
            targets,
            self._store,
            lanes=open_lanes(self._device),
            pool=pool or Pool(work.threads),
            buffers=buffers,
            speculation="deferred" if work.speculate == "deferred" else "none",
            mode=mode,
        )

    def _rules(self, lr: float, scale: float) -> list[Rule]:
        beta1, beta2 = self._spec.betas
        decays = (self._spec.weight_decay, 0.0)
        return [Rule("adamw", lr, beta1, beta2, self._spec.eps, d, self.updates + 1, scale) for d in decays]

    def begin(self, lr: float, scale: float) -> None:
        """See ``Optimizer``."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._engine.begin(self._rules(lr, scale))

    def micro_batch(self, *, last: bool) -> None:
        """Say that gradients from now on are of another micro-batch."""
        self._engine.micro_batch(last=last)

    def arrive(self, name: str, gradient: torch.Tensor) -> None:
        """Take a reduced gradient during a backward pass."""
        if local(gradient).numel() > 0:
            self._engine.arrive(name, local(gradient))

    def sums(self, mode: Mode) -> LocalSums:
        """See ``Optimizer``."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.arrive(name, parameter.grad)
                parameter.grad = None
        blocks, finite = self._engine.sums(leaving_out=self._copies)
        return host_sums(blocks, finite, self._device)

    def step(self, lr: float, scale: float) -> None:
        """See ``Optimizer``."""
        rules = self._rules(lr, scale)
        self._engine.settle(rules)
        self.updates += 1

    def skip(self) -> None:
        """See ``Optimizer``."""
        self._engine.settle(None)

    def state(self) -> dict[str, torch.Tensor]:
        """See ``Optimizer``."""
        _, *moments = self._store.flat()
        kinds = zip(MOMENTS["adamw"], moments, strict=True)
        return {f"{kind}.{name}": self._placed(name, flat) for kind, flat in kinds for name in self._parameters}

    def masters(self) -> dict[str, torch.Tensor]:
        """See ``Optimizer``."""
        masters = {name: self._placed(name, self._store.flat()[0]) for name in self._parameters}
        return masters | {name: placed_like(self._frozen[name], kept) for name, kept in self._kept.items()}

    def _placed(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """Return a parameter's part of a flat array of all, placed as the parameter is."""
        parameter, first = self._parameters[name], self._places.get(name, 0)
        part = local(parameter.detach())
        return placed_like(parameter, flat[first : first + part.numel()].view(part.shape))

    def settle(self) -> None:
        """See ``Optimizer``."""
        self._engine.flush()

    def loaded(self) -> None:
        """See ``Optimizer``."""
        self._store.written()
        self._engine.rebuild()
        with torch.no_grad():
            for name, kept in self._kept.items():
                local(self._frozen[name]).copy_(kept)

    def close(self) -> None:
        """See ``Optimizer``."""
        self._engine.close()
