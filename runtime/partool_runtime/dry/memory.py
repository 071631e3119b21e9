"""Follows the memory of a device's tensors: when storages appear and go, and the term that each belongs to."""

from __future__ import annotations

import weakref
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from partool.plan.rank_trace import MemoryOwner, MemoryTrace
from partool_runtime.dry.allocator import CachingAllocator, DeviceFull
from partool_runtime.dry.memory_blocks import MemoryBlock
from partool_runtime.dry.owners import ELSEWHERE, term_of_caller
from partool_runtime.torch_internals.fake import in_backward
from partool_runtime.torch_internals.tensors import local

POINTS = 400
"""Most points of the timeline."""
_OWNERS = 30
"""Most operators that a trace names."""


class Holding:
    """One allocation: a storage from its creation, or from a growth, to its end."""

    __slots__ = ("end", "operator", "passing", "size_bytes", "stream", "term")

    def __init__(self, size_bytes: int, term: str, operator: str, stream: int, passing: int) -> None:
        self.size_bytes, self.term, self.operator, self.stream = size_bytes, term, operator, stream
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
        self._kind = kind
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

    def saw(self, operator: str, results: Any) -> None:
        """Count the storages of an operator's results that are new."""
        if isinstance(results, torch.Tensor):
            self._one(operator, results)
        elif isinstance(results, list | tuple):
            for result in results:
                self.saw(operator, result)

    def _one(self, operator: str, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._kind:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live:
            return
        term = term_of_caller(self.phase, operator)
        size_bytes = 0 if term == ELSEWHERE else storage.nbytes()
        self._enter(storage, address, Holding(size_bytes, term, operator, self._stream(), self.passing()))

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
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

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
        return torch.accelerator.current_stream().stream_id if self._kind == "cuda" else 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow storages that change their size, as FSDP's do."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = self._live.get(storage._cdata)
            if found is not None and found[0].size_bytes != size:
                old = found[0]
                self._gone(storage._cdata)
                again = Holding(size, old.term, old.operator, self._stream(), self.passing())
                self._enter(storage, storage._cdata, again)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def belongs(self, term: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Say that the storages of ``tensors`` belong to a term, from their creation on."""
        for tensor in tensors:
            found = None if tensor is None else self._live.get(local(tensor).untyped_storage()._cdata)
            if found is not None:
                found[0].term = term

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
        held, before, peak_bytes, peak_at = 0, 0, 0, 0
        timeline: list[tuple[int, int]] = []
        for at, entry in enumerate(self.log):
            before = held if at == self._begin else before
            size_bytes = self.made[entry].size_bytes if entry >= 0 else -self.made[~entry].size_bytes
            held += size_bytes
            if at >= self._begin:
                timeline.append((self.moments[at], held))
                if held > peak_bytes:
                    peak_bytes, peak_at = held, at
        terms, owners = self._at(peak_at)
        peak = timeline[peak_at - self._begin] if timeline else (0, 0)
        return MemoryTrace(
            peak_bytes=peak_bytes,
            terms_bytes=terms,
            owners=owners,
            timeline=tuple(_thinned(timeline, peak)),
            left_bytes=held - before,
            reserved_bytes=0 if allocator is None else self._reserved(allocator),
        )

    def settle(self) -> None:
        """Tensors that end in the pass that created them were not saved for another pass, nor are they state."""
        for holding in self.made:
            if holding.term in ("activations", "optimizer") and holding.end == holding.passing:
                holding.term = "working"

    def _at(self, peak_at: int) -> tuple[dict[str, int], tuple[MemoryOwner, ...]]:
        there: set[int] = set()
        for entry in self.log[: peak_at + 1]:
            (there.add if entry >= 0 else there.discard)(entry if entry >= 0 else ~entry)
        terms: dict[str, int] = defaultdict(int)
        sizes: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for place in there:
            holding = self.made[place]
            terms[holding.term] += holding.size_bytes
            owner = sizes[holding.term, holding.operator]
            owner[0], owner[1] = owner[0] + holding.size_bytes, owner[1] + 1
        owners = sorted((MemoryOwner(*key, *size) for key, size in sizes.items()), key=lambda each: -each.size_bytes)
        return {term: size for term, size in sorted(terms.items()) if size}, tuple(owners[:_OWNERS])

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


def _thinned(timeline: list[tuple[int, int]], peak: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the highest point of each of :data:`POINTS` stretches; the peak of all is among them."""
    each = max(1, -(-len(timeline) // POINTS))
    for start in range(0, len(timeline), each):
        stretch = timeline[start : start + each]
        yield peak if peak in stretch else max(stretch, key=lambda point: point[1])
