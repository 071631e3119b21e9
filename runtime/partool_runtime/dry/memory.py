"""Follows the memory of a device's tensors: when storages appear and go, and the term that each belongs to."""

from __future__ import annotations

import functools
import re
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from partool.plan.rank_trace import MemoryOwner, MemoryTrace
from partool_runtime.dry.allocator import CachingAllocator, DeviceFull
from partool_runtime.dry.memory_blocks import MemoryBlock
from partool_runtime.dry.owners import ELSEWHERE, caller
from partool_runtime.torch_internals.fake import in_backward
from partool_runtime.torch_internals.tensors import local

POINTS = 400
"""Most points of the timeline."""
_OWNERS = 30
"""Most owners that a trace names."""
Owner = tuple[str, str, str]
"""Term, operator and module of tensors."""


class Holding:
    """One allocation: a storage from its creation, or from a growth, to its end."""

    __slots__ = ("end", "module", "operator", "passing", "size_bytes", "stream", "term")

    def __init__(
        self, size_bytes: int, term: str, operator: str, stream: int, passing: int, *, module: str = ""
    ) -> None:
        self.size_bytes, self.term, self.operator, self.stream = size_bytes, term, operator, stream
        self.module = module
        """Name of the module that created the storage, or of the parameter that it holds; empty if there is none."""
        self.passing = passing
        """Number of the forward or backward pass in which the storage was created."""
        self.end = -1
        """Number of the pass in which it ended; -1 while it lasts."""


class MemoryRecord:
    """Records allocations of one kind of device; :class:`CollectiveRecord` tells it of every operator's results.

    Storages are counted once, with all bytes that they were created with, whoever uses them. Operators' internal
    memory is not seen.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """Type of the devices whose memory is recorded."""
        self._live: dict[int, tuple[Holding, int, Any]] = {}
        """Holding, place in ``made`` and weak reference, by the address of the storage."""
        self.made: list[Holding] = []
        """All allocations."""
        self.log = array("q")
        """Places in ``made`` as they are allocated, and their complements as they are freed."""
        self.moments = array("q")
        """Number of the step's operators that ran before each entry of ``log``."""
        self.phase = "parameters"
        """Term of tensors whose creator no table names."""
        self._passes, self._backward = 0, False
        self.operators = 0
        self._begin = 0
        self._names: dict[int, str] = {}

    def know(self, model: nn.Module) -> None:
        """Name tensors by the modules of a model from now on, and those of its parameters by their names."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self.belongs("parameters", dict(model.named_parameters()))

    def saw(self, operator: str, results: Any) -> None:
        """Count the storages of an operator's results that are new."""
        if isinstance(results, torch.Tensor):
            self._one(operator, results)
        elif isinstance(results, list | tuple):
            for result in results:
                self.saw(operator, result)

    def _one(self, operator: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != self.kind:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live:
            return
        term, module = caller(self.phase, self._names)
        size_bytes = 0 if term == ELSEWHERE else storage.nbytes()
        holding = Holding(size_bytes, term, operator, self._stream(), self.passing(), module=module)
        self._enter(storage, address, holding)

    def _enter(self, storage: torch.UntypedStorage, address: int, holding: Holding) -> None:
        place = len(self.made)
        self.made.append(holding)
        self._note(place)
        self._live[address] = holding, place, weakref.ref(storage, lambda _: self._gone(address))

    def _gone(self, address: int) -> None:
        holding, place, _ = self._live.pop(address)
        holding.end = self.passing()
        self._note(~place)

    def _note(self, entry: int) -> None:
        self.log.append(entry)
        self.moments.append(self.operators)

    def place(self, tensor: torch.Tensor) -> int | None:
        """Return the place in ``made`` of the allocation that a tensor lies in; None if it is not followed."""
        live = self._live.get(tensor.untyped_storage()._cdata)
        return None if live is None else live[1]

    def holds(self, place: int) -> bool:
        """Return whether the allocation at a place of ``made`` lasts."""
        return self.made[place].end < 0

    def follow(self, tensor: torch.Tensor, place: int) -> None:
        """Follow a new tensor as the allocation at ``place``, which is recorded already."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._live[address] = self.made[place], place, weakref.ref(storage, lambda _: self._gone(address))

    def forget(self, tensor: torch.Tensor) -> None:
        """Follow a tensor's storage no longer: somebody else records its end."""
        del self._live[tensor.untyped_storage()._cdata]

    def made_again(self, holding: Holding) -> int:
        """Record an allocation without a tensor; return its place in ``made``."""
        self.made.append(holding)
        self._note(len(self.made) - 1)
        return len(self.made) - 1

    def gone_again(self, place: int) -> None:
        """Record the end of an allocation without a tensor, or of one that is followed no longer."""
        self.made[place].end = self.passing()
        self._note(~place)

    def passing(self) -> int:
        """Return the number of the forward or backward pass that runs."""
        backward = in_backward()
        if backward != self._backward:
            self._backward = backward
            self._passes += 1
        return self._passes

    def _stream(self) -> int:
        return torch.accelerator.current_stream().stream_id if self.kind == "cuda" else 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow storages that change their size, as FSDP's do."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            live = self._live.get(storage._cdata)
            if live is not None and live[0].size_bytes != size:
                old = live[0]
                self._gone(storage._cdata)
                resized_holding = Holding(
                    size, old.term, old.operator, self._stream(), self.passing(), module=old.module
                )
                self._enter(storage, storage._cdata, resized_holding)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def belongs(self, term: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Say that the storages of ``tensors``, by parameter, belong to a term, from their creation on."""
        for name, tensor in tensors.items():
            live = None if tensor is None else self._live.get(local(tensor).untyped_storage()._cdata)
            if live is not None:
                live[0].term, live[0].module = term, name

    def begin(self) -> None:
        """Begin the step whose peak is asked for; what is held counts."""
        self._begin, self.operators = len(self.log), 0

    def replace(self, made: list[Holding], log: Iterable[int], moments: Iterable[int], begin: int) -> None:
        """Record something else; ``begin`` is the first entry of the step whose peak is asked for."""
        self.made, self.log, self.moments = made, array("q", log), array("q", moments)
        self._begin = begin

    def trace(self, allocator: CachingAllocator | None) -> MemoryTrace:
        """Return the memory of the step since :meth:`begin`; ``allocator`` models the device's allocator, if any."""
        self.settle()
        live_bytes, before, peak_bytes, peak_at = 0, 0, 0, 0
        timeline: list[tuple[int, int]] = []
        for at, entry in enumerate(self.log):
            before = live_bytes if at == self._begin else before
            size_bytes = self.made[entry].size_bytes if entry >= 0 else -self.made[~entry].size_bytes
            live_bytes += size_bytes
            if at >= self._begin:
                timeline.append((self.moments[at], live_bytes))
                if live_bytes > peak_bytes:
                    peak_bytes, peak_at = live_bytes, at
        at_peak = self._live_by_owner(peak_at + 1)
        terms: Counter[str] = Counter()
        for (term, _, _), (size_bytes, _) in at_peak.items():
            terms[term] += size_bytes
        peak = timeline[peak_at - self._begin] if timeline else (0, 0)
        return MemoryTrace(
            peak_bytes=peak_bytes,
            terms_bytes={term: terms[term] for term in sorted(terms) if terms[term]},
            owners=_largest(at_peak),
            timeline=tuple(_thinned(timeline, peak)),
            leaked_bytes=live_bytes - before,
            leaked=self._grown() if live_bytes > before else (),
            reserved_bytes=0 if allocator is None else self._reserved(allocator),
        )

    def settle(self) -> None:
        """Tensors that end in the pass that created them were not saved for another pass, nor are they state."""
        for holding in self.made:
            if holding.term in ("activations", "optimizer") and holding.end == holding.passing:
                holding.term = "working"

    def _live_by_owner(self, stop: int) -> dict[Owner, tuple[int, int]]:
        """Return bytes and number of the tensors held after the first ``stop`` entries of the log, by owner."""
        live_places: set[int] = set()
        for entry in self.log[:stop]:
            (live_places.add if entry >= 0 else live_places.discard)(entry if entry >= 0 else ~entry)
        by_owner: dict[Owner, tuple[int, int]] = {}
        for place in live_places:
            holding = self.made[place]
            owner = holding.term, holding.operator, alike(holding.module)
            size_bytes, count = by_owner.get(owner, (0, 0))
            by_owner[owner] = size_bytes + holding.size_bytes, count + 1
        return by_owner

    def _grown(self) -> tuple[MemoryOwner, ...]:
        before, after = self._live_by_owner(self._begin), self._live_by_owner(len(self.log))
        more = {owner: (after[owner][0] - before.get(owner, (0, 0))[0], after[owner][1]) for owner in after}
        return _largest({owner: each for owner, each in more.items() if each[0] > 0})

    def _reserved(self, allocator: CachingAllocator) -> int:
        blocks: dict[int, MemoryBlock] = {}
        try:
            for entry in self.log:
                if entry >= 0 and self.made[entry].size_bytes:
                    blocks[entry] = allocator.allocate(self.made[entry].size_bytes, self.made[entry].stream)
                elif entry < 0 and ~entry in blocks:
                    allocator.free(blocks.pop(~entry))
        except DeviceFull as full:
            return full.reserved_bytes + full.requested_bytes
        return allocator.peak_reserved_bytes


def _largest(by_owner: Mapping[Owner, tuple[int, int]]) -> tuple[MemoryOwner, ...]:
    owners = [
        MemoryOwner(term, operator, size_bytes, count, module)
        for (term, operator, module), (size_bytes, count) in by_owner.items()
    ]
    return tuple(sorted(owners, key=lambda each: (-each.size_bytes, each))[:_OWNERS])


@functools.cache
def alike(module: str) -> str:
    """Return the name that a module has in common with those of other layers: ``layers.*.ffn``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _thinned(timeline: list[tuple[int, int]], peak: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the highest point of each of :data:`POINTS` stretches; the peak of all is among them."""
    each = max(1, -(-len(timeline) // POINTS))
    for start in range(0, len(timeline), each):
        stretch = timeline[start : start + each]
        yield peak if peak in stretch else max(stretch, key=lambda point: point[1])
