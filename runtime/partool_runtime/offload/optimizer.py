"""Optimizer whose state is in host memory: the engine, with parameter names, groups and hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import nn

from partool.plan.layout import OffloadLayout
from partool.spec.training import OptimizerSpec
from partool_kernels.host import Pool
from partool_runtime.offload.buckets import BLOCK, Bucket, fill_buckets, places
from partool_runtime.offload.disk import DiskStore
from partool_runtime.offload.engine import Buffers, HostEngine, WeightsTarget
from partool_runtime.offload.lanes import Lanes, open_lanes
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.parameters import HostParameters
from partool_runtime.offload.passes import Speculation
from partool_runtime.offload.resident import Resident, share_note, tail
from partool_runtime.offload.store import MemoryStore, StateStore
from partool_runtime.offload.worker import PassWorker, SerialWorker
from partool_runtime.optim.grad_norm import LocalSums, Mode, host_sums
from partool_runtime.optim.groups import grouped
from partool_runtime.optim.types import CountsUpdates
from partool_runtime.torch_internals.tensors import local, placed_like


@dataclass(frozen=True, slots=True)
class HostSetting:
    """Settings of a rank's optimizer in host memory."""

    work: OffloadLayout
    device: torch.device
    """Device of compute; parameters may be in host memory and be streamed to the device."""
    master: torch.dtype
    compute: torch.dtype
    accumulates: bool
    """Whether a step has several micro-batches, each of which delivers gradients."""
    memory: HostMemory
    pool: Pool
    shards: HostParameters | None = None
    """Store of parameter shards, to which the optimizer writes new weights; None if the shards are on the device."""
    owner: str = "rank 0"
    """Owner of the state, for messages."""
    mode: Mode = "auto"
    lanes: Callable[[torch.device], Lanes] = open_lanes
    worker: Callable[[str], PassWorker] = SerialWorker
    state_file: Callable[..., StateStore] = DiskStore
    """Opens the store of states on disks."""

    @property
    def wire(self) -> torch.dtype:
        """Type in which gradients are copied to the host."""
        return self.master if self.work.gradients == "fp32" else self.compute

    @property
    def speculation(self) -> Speculation:
        """Kind of speculation; see :class:`partool_runtime.offload.engine.HostEngine`."""
        asked = self.work.speculate
        return "undo" if asked == "undo" else "deferred" if asked else "none"

    @property
    def bucket_elements(self) -> int:
        """Maximum number of elements in a bucket."""
        return max(BLOCK, self.work.bucket_bytes // self.wire.itemsize)

    def dtypes(self, moments: int) -> tuple[torch.dtype, ...]:
        """Return the types of a parameter's state: its master and ``moments`` moments."""
        return (self.master, *[torch.bfloat16 if self.work.moments == "bf16" else self.master] * moments)


class HostOptimizer(CountsUpdates):
    """Updates states in host memory; see :class:`partool_runtime.optim.types.Optimizer`.

    ``parameters`` are sharded, have the type of computation, and are in the order in which their gradients are
    expected.
    ``copies`` names parameters whose gradients another rank counts in the norm.
    """

    term = "offload"
    """See ``Optimizer``. The term's time is the time for which training waits for the host's work."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimizerSpec,
        copies: Collection[str],
        setting: HostSetting,
    ) -> None:
        self._parameters, self._copies = dict(parameters), frozenset(copies)
        self._device, self._shards = setting.device, setting.shards
        self._setting = setting
        self._groups = grouped(spec, {name: p.ndim for name, p in parameters.items()})
        shards = [(name, local(p).numel()) for name, p in parameters.items() if local(p).numel() > 0]
        staying = tail(shards, setting.work.gpu_fraction)
        buckets = fill_buckets((shard for shard in shards if shard[0] not in staying), setting.bucket_elements)
        self._buckets, self._places = buckets, places(buckets)
        dtypes = setting.dtypes(len(self._groups.moments))
        self._store, notes = _open_store(buckets, dtypes, setting)
        shared = share_note(shards, staying, setting.work.gpu_fraction)
        self.notes = (*notes, *shared, *(() if self._shards is None else self._shards.notes))
        targets = {name: self._target(name) for name, _ in shards}
        lanes = setting.lanes(setting.device)
        self._resident = Resident(
            {name: target for name, target in targets.items() if name in staying},
            dtypes,
            lanes=lanes,
            pool=setting.pool,
            accumulates=setting.accumulates,
            mode=setting.mode,
        )
        self._engine = HostEngine(
            buckets,
            {name: target for name, target in targets.items() if name not in staying},
            self._store,
            lanes=lanes,
            pool=setting.pool,
            buffers=_buffers(buckets, setting),
            speculation=setting.speculation,
            undo_bytes=setting.work.undo_bytes,
            resident=self._resident if staying else None,
            mode=setting.mode,
            worker=setting.worker,
        )
        self.figures = self._engine.figures
        """Counters of the engine."""

    def _target(self, name: str) -> WeightsTarget:
        weights = local(self._parameters[name]).detach().view(-1)
        return WeightsTarget(weights, self._groups.of[name], in_host=self._shards is not None)

    def begin(self, lr: float, scale: float) -> None:
        """See ``Optimizer``."""
        for parameter in self._parameters.values():
            parameter.grad = None
        with self._abandoning():
            self._engine.begin(self._groups.rules(lr, self.updates + 1, scale))
        if self._shards is not None:
            self._shards.begin()

    def micro_batch(self, *, last: bool) -> None:
        """Mark the start of another micro-batch's gradients."""
        self._engine.micro_batch(last=last)

    def arrive(self, name: str, gradient: torch.Tensor) -> None:
        """Take a reduced gradient during a backward pass."""
        if local(gradient).numel() > 0:
            self._engine.arrive(name, local(gradient))

    def sums(self, mode: Mode) -> LocalSums:
        """See ``Optimizer``."""
        if self._shards is not None:
            self._shards.settle()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.arrive(name, parameter.grad)
                parameter.grad = None
        blocks, finite = self._engine.sums(leaving_out=self._copies)
        return host_sums(blocks, finite, self._device)

    def step(self, lr: float, scale: float) -> None:
        """See ``Optimizer``."""
        self._engine.settle(self._groups.rules(lr, self.updates + 1, scale))
        self.updates += 1
        self._written()

    def skip(self) -> None:
        """See ``Optimizer``."""
        self._engine.settle(None)
        self._written()

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Allow writes to shards within the context if the last step was interrupted and is therefore dropped."""
        interrupted = self._shards is not None and self._engine.in_step
        if interrupted and self._shards is not None:
            self._shards.settle()
        yield
        if interrupted:
            self._written()

    def _written(self) -> None:
        if self._shards is not None:
            self._shards.written()

    def state(self) -> dict[str, torch.Tensor]:
        """See ``Optimizer``."""
        kinds = enumerate(self._groups.moments, start=1)
        return {f"{kind}.{name}": self._placed(name, place) for place, kind in kinds for name in self._parameters}

    def masters(self) -> dict[str, torch.Tensor]:
        """See ``Optimizer``."""
        return {name: self._placed(name, 0) for name in self._parameters}

    def _placed(self, name: str, place: int) -> torch.Tensor:
        """Return a parameter's master or moment, at index ``place`` of its state, with the parameter's placement."""
        parameter = self._parameters[name]
        part = local(parameter).detach()
        if name in self._resident:
            flat = self._resident.state(name)[place]
        else:
            first = self._places.get(name, 0)
            flat = self._store.flat()[place][first : first + part.numel()]
        return placed_like(parameter, flat.view(part.shape))

    def settle(self) -> None:
        """See ``Optimizer``."""
        with self._abandoning():
            self._engine.flush()

    def loaded(self) -> None:
        """See ``Optimizer``."""
        self._store.written()
        self._engine.rebuild()
        self._written()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of host memory that the rank holds, by keys of :data:`partool.plan.terms.HOST_TERMS`."""
        setting, sizes = self._setting, [bucket.elements for bucket in self._buckets]
        master, *moments = (dtype.itemsize for dtype in setting.dtypes(len(self._groups.moments)))
        here, state = sum(sizes), sum(sizes) * (master + sum(moments))
        if setting.work.optimizer == "nvme":
            here = min(here, setting.work.buffers * max(sizes, default=0))
        by_term = {
            "masters": here * master,
            "moments": here * sum(moments),
            "totals": sum(sizes) * master if setting.accumulates else 0,
            "copies": min(setting.work.undo_bytes, state) if setting.work.speculate == "undo" else 0,
        }
        return {term: size for term, size in (by_term | setting.memory.purposes).items() if size}

    def state_bytes(self) -> int:
        """Return the bytes of states on compute's device; on a CPU, the bytes of all states and their undo copies."""
        stays = [name for name in self._parameters if name in self._resident]
        size = sum(tensor.nbytes for name in stays for tensor in self._resident.state(name))
        if self._device.type != "cpu":
            return size
        host_bytes = self.held_bytes()
        return size + sum(host_bytes.get(term, 0) for term in ("masters", "moments", "copies"))

    @property
    def gradients_on_device(self) -> Mapping[str, torch.Tensor]:
        """Gradients that stay on compute's device until the norm is known, by parameter; each is flat."""
        return self._resident.gradients

    def gradient_bytes(self) -> int:
        """Return the bytes of gradients that stay on compute's device until the norm is known."""
        return sum(gradient.nbytes for gradient in self.gradients_on_device.values())

    def report(self) -> dict[str, float]:
        """See ``Optimizer``: the engine's counters."""
        return asdict(self.figures)

    def close(self) -> None:
        """See ``Optimizer``."""
        self._engine.close()
        if self._shards is not None:
            self._shards.close()


def _open_store(
    buckets: Sequence[Bucket], dtypes: Sequence[torch.dtype], setting: HostSetting
) -> tuple[StateStore, tuple[str, ...]]:
    """Return the store of masters and moments, and notes for the run's log."""
    if setting.work.optimizer != "nvme":
        return MemoryStore(buckets, dtypes, setting.pool), ()
    work = setting.work
    disk = setting.state_file(buckets, dtypes, work.dir or "", buffers=work.buffers, owner=setting.owner)
    return disk, disk.notes


def _buffers(buckets: Sequence[Bucket], setting: HostSetting) -> Buffers:
    return Buffers(
        buckets,
        gradients=setting.wire,
        weights=setting.compute,
        totals=setting.master if setting.accumulates else None,
        memory=setting.memory,
        pinned_bytes=setting.work.pinned_limit_bytes,
    )
