"""An offload engine and the reference that it must agree with to the bit, both given the same steps."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from partool_kernels.host import MOMENTS, Part, Pool, StepRule, UpdatePass, sums, update
from partool_kernels.reductions import total
from partool_runtime.offload.buckets import Bucket, fill_buckets, places
from partool_runtime.offload.buffers import Buffers
from partool_runtime.offload.engine import HostEngine
from partool_runtime.offload.lanes import ThreadLanes
from partool_runtime.offload.passes import Speculation, WeightsTarget
from partool_runtime.offload.resident import Resident
from partool_runtime.offload.store import MemoryStore
from partool_runtime.offload.verdicts import Verdicts

SHARDS = {"a": 7, "b": 2**16 + 5, "c": 2**11, "d": 1, "e": 70001}
GROUPS = {"a": 1, "b": 0, "c": 0, "d": 1, "e": 0}
BUCKET = 2**16 + 2**12
KINDS: tuple[str, ...] = ("adamw", "lion", "adagrad", "sgd")


@dataclass(frozen=True)
class Case:
    """Configuration of an engine."""

    speculation: Speculation = "deferred"
    micro_batches: int = 1
    kind: str = "adamw"
    compute: torch.dtype = torch.bfloat16
    wire: torch.dtype = torch.bfloat16
    moments: torch.dtype | None = None
    """Type of the moments; None: that of the masters."""
    undo_buckets: int = 9
    """Room for undo copies, in multiples of the largest bucket."""
    spare: int = 2
    resident: tuple[str, ...] = ()
    in_host: tuple[str, ...] = ()
    lends_copies: bool = False
    seed: int = 5

    @property
    def master(self) -> torch.dtype:
        return torch.float64 if self.compute == torch.float64 else torch.float32


@dataclass(frozen=True)
class Step:
    """Events of one step."""

    lr: float = 1e-3
    clip: float = math.inf
    poison: str = ""
    missing: frozenset[str] = frozenset()
    shuffled: bool = False
    backwards: bool = False
    """Whether gradients arrive in the reverse of the initially expected order."""
    flushed: bool = False
    """Whether the engine is flushed before the next step."""
    left: bool = False
    """Whether the step is abandoned: its gradients arrive, but it is not settled."""
    loss_scale: float = 1.0


class Lender(MemoryStore):
    """Store that lends copies, as a disk does: changes in a bucket that was not opened for writing are lost."""

    def __init__(self, buckets: Sequence[Bucket], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(buckets, dtypes)
        self.asked: list[int] = []
        self.surprises = self.in_vain = 0
        self.fails_at: int | None = None

    def expect(self, order: Sequence[int]) -> None:
        self.in_vain += len(self.asked)
        self.asked = list(order)

    @contextmanager
    def open(self, bucket: int, *, write: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        if bucket == self.fails_at:
            raise OSError(5, "the disk is gone")
        if self.asked[:1] == [bucket]:
            self.asked.pop(0)
        else:
            self.surprises += 1
        with super().open(bucket, write=write) as state:
            copies = tuple(tensor.clone() for tensor in state)
            yield copies
            if write:
                for tensor, copy in zip(state, copies, strict=True):
                    tensor.copy_(copy)


class Together:
    """Engine and reference; :meth:`step` makes a step of both, :meth:`compare` asserts that they agree."""

    def __init__(self, case: Case, shards: Mapping[str, int] = SHARDS, *, delays: bool = True) -> None:
        self.case, self.shards = case, dict(shards)
        self.draws = torch.Generator().manual_seed(case.seed)
        self.random = random.Random(case.seed)
        held = [(name, size) for name, size in shards.items() if size and name not in case.resident]
        buckets = fill_buckets(held, BUCKET)
        dtypes = (case.master, *((case.moments or case.master) for _ in MOMENTS[case.kind]))
        self.weights = {name: torch.zeros(size, dtype=case.compute) for name, size in shards.items()}
        targets = {
            name: WeightsTarget(weights, GROUPS[name], in_host=name in case.in_host)
            for name, weights in self.weights.items()
        }
        self.store = (Lender if case.lends_copies else MemoryStore)(buckets, dtypes)
        lanes, pool = ThreadLanes(random.Random(case.seed) if delays else None), Pool()
        self.resident = Resident(
            {name: targets[name] for name in case.resident},
            dtypes,
            lanes=lanes,
            pool=pool,
            accumulates=case.micro_batches > 1,
        )
        state_bytes = sum(dtype.itemsize for dtype in dtypes)
        self.engine = HostEngine(
            buckets,
            targets,
            self.store,
            lanes=lanes,
            pool=pool,
            buffers=Buffers(
                buckets,
                gradients=case.wire,
                weights=case.compute,
                totals=case.master if case.micro_batches > 1 else None,
                spare=case.spare,
            ),
            speculation=case.speculation,
            undo_bytes=int(case.undo_buckets * BUCKET * state_bytes),
            resident=self.resident,
        )
        self.engine.verdicts = Verdicts(window=4, most_rejected=0.25)
        starts = places(buckets)
        self.flat = {
            name: self.resident.state(name)
            if name in case.resident
            else tuple(flat[starts.get(name, 0) : starts.get(name, 0) + size] for flat in self.store.flat())
            for name, size in shards.items()
        }
        self.states = {name: [self._value(k, size, d) for k, d in enumerate(dtypes)] for name, size in shards.items()}
        self.done = 0
        self.load()

    def _value(self, index: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        drawn = torch.randn(size, generator=self.draws, dtype=torch.float64) * 0.1
        return (drawn if index == 0 else drawn.square()).to(dtype)

    def load(self) -> None:
        """Write the reference's states into the engine's, as a resume does."""
        for name, state in self.states.items():
            for flat, value in zip(self.flat[name], state, strict=True):
                flat.copy_(value)
        self.engine.rebuild()

    def rules(self, step: int, lr: float, scale: float) -> list[StepRule]:
        """Return the rules of two groups that differ in every hyperparameter."""
        kind = self.case.kind
        return [
            StepRule(kind, lr, 0.9, 0.95, 1e-8, 0.1, step, scale),
            StepRule(kind, lr * 0.3, 0.8, 0.99, 1e-6, 0.0, step, scale),
        ]

    def gradients(self, step: Step) -> list[dict[str, torch.Tensor]]:
        """Draw the gradients of all micro-batches."""
        found = []
        for _ in range(self.case.micro_batches):
            drawn = {
                name: (torch.randn(size, generator=self.draws, dtype=torch.float64) * step.loss_scale).to(
                    self.case.wire
                )
                for name, size in self.shards.items()
            }
            found.append({name: grad for name, grad in drawn.items() if name not in step.missing})
        if step.poison in found[-1] and len(found[-1][step.poison]):
            found[-1][step.poison][-1] = self.random.choice([math.inf, -math.inf, math.nan])
        return found

    def step(self, step: Step) -> None:
        """Make a step of engine and reference."""
        grads = self.gradients(step)
        self.engine.begin(self.rules(self.done + 1, step.lr, 1.0 / step.loss_scale))
        for index, micro in enumerate(grads):
            self.engine.micro_batch(last=index == len(grads) - 1)
            names = [name for name in micro if self.shards[name]]
            if step.backwards:
                names.reverse()
            if step.shuffled:
                self.random.shuffle(names)
            for name in names:
                self.engine.arrive(name, micro[name].clone())
        if step.left:
            return
        blocks, finite = self.engine.sums()
        whole = {name: self._whole([g[name] for g in grads if name in g], size) for name, size in self.shards.items()}
        expected = sums(list(whole.values()))
        assert finite == all(expected.finite)
        if not finite:
            self.engine.settle(None)
            return
        assert total(blocks) == total([block for part in expected.squares for block in part])
        norm = math.sqrt(total(blocks)) / step.loss_scale
        scale = (step.clip / norm if norm > step.clip else 1.0) / step.loss_scale
        self.done += 1
        rules = self.rules(self.done, step.lr, scale)
        self.engine.settle(rules)
        for name, (master, *moments) in self.states.items():
            update([Part(master, tuple(moments), GROUPS[name])], step=UpdatePass([whole[name]], rules))

    def _whole(self, grads: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Add the micro-batches' gradients up in the masters' type, in order."""
        if len(grads) == 1 and self.case.micro_batches == 1:
            return grads[0]
        added = torch.zeros(size, dtype=self.case.master)
        for grad in grads:
            added += grad.to(self.case.master)
        return added

    def compare(self, *, flushed: bool) -> None:
        """Compare the weights and, after a flush, the masters and moments."""
        for name, state in self.states.items():
            assert torch.equal(self.weights[name], state[0].to(self.case.compute)), name
            if flushed:
                for mine, other in zip(self.flat[name], state, strict=True):
                    assert torch.equal(mine, other), name

    def go(self, history: Sequence[Step]) -> None:
        """Make steps, comparing after each; flush and compare everything at the end."""
        self.compare(flushed=True)
        for step in history:
            self.step(step)
            if step.flushed:
                self.engine.flush()
            if not step.left:
                self.compare(flushed=step.flushed)
        self.engine.flush()
        self.compare(flushed=True)


@contextmanager
def together(case: Case, shards: Mapping[str, int] = SHARDS, *, delays: bool = True) -> Iterator[Together]:
    """Set engine and reference up, and close the engine at the end."""
    both = Together(case, shards, delays=delays)
    try:
        yield both
    finally:
        both.engine.close()
