"""Moves tensors that autograd has saved into host memory, layer by layer, and prefetches them one layer before use.

One pair of pack and unpack hooks handles all tensors that layers save between their forward and backward passes. A
recomputed layer saves only its inputs. Copies run on separate lanes while the device computes. The copy to the
host runs while the next layer computes, and the copy to the device runs while the following layer computes its
gradients. A layer's saved tensors leave device memory two layers later at the latest, so the device holds the saved
tensors of at most two layers (ALST offloads inputs of layers in this way, arXiv 2506.13996, section 3.3). Parameters,
and tensors that all layers share, stay on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, finalize

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from partool_runtime.model.attention import Context
from partool_runtime.offload.host import Lent, Slabs
from partool_runtime.offload.lanes import Lanes, Mark, open_lanes
from partool_runtime.offload.memory import HostMemory
from partool_runtime.torch_internals.tensors import is_plain, storage_key

LEAST_BYTES = 2**20
"""Bytes of the smallest tensors that are moved; for smaller tensors, starting a copy takes longer than the copy."""
_BEHIND = 1
"""Number of layers before the current layer whose copies to the host may still be in flight."""


class _Stored:
    """Storage of saved tensors; it is on the device before the copy to the host and again after the copy back."""

    def __init__(self, lent: Lent, on_device: torch.Tensor) -> None:
        self.lent = lent
        self.size_bytes = on_device.numel()
        self.on_device: torch.Tensor | None = on_device
        """The storage's content on the device, as uint8; None while the content is only in host memory."""
        self.waiting = 0
        """Number of tensors that are not unpacked yet."""
        self.arrived: Mark | None = None
        """Mark after the copy to the device."""


class _Layer:
    """Tensors that one pass of one layer has saved."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = before
        """Tensors that the previous layer has saved in the same pass; None if there is no previous layer."""
        self.stored: list[_Stored] = []
        self.copied: Mark | None = None
        """Mark after the last copy of these tensors to the host."""
        self.asked = False
        """Whether the layer's backward pass has begun."""


class _Packed(NamedTuple):
    """Placeholder that autograd keeps in place of a saved tensor."""

    stored: _Stored
    layer: _Layer
    like: torch.Tensor
    """Tensor on the meta device with the saved tensor's type, size and strides."""
    offset: int


class Activations:
    """Keeps the saved tensors of the layers given to :meth:`put` in host memory; a rank has one such object."""

    def __init__(
        self,
        device: torch.device,
        *,
        least_bytes: int = LEAST_BYTES,
        slabs: Slabs | None = None,
        lanes: Lanes | None = None,
        ahead: int = 1,
    ) -> None:
        """``ahead`` is the number of layers between the start of a layer's prefetch and the use of its tensors."""
        self._device, self._least_bytes, self._ahead = device, least_bytes, ahead
        self.slabs = slabs or Slabs(HostMemory(pinned=device.type == "cuda"))
        self._lanes = lanes or open_lanes(device)
        if lanes is None:
            finalize(self, self._lanes.close)
        self._latest: WeakValueDictionary[int, _Layer] = WeakValueDictionary()
        """Tensors that the latest pass of each layer has saved, by the layer's number."""
        self._leaving: deque[_Layer] = deque()
        self.moved_bytes = 0
        """Bytes copied to the host so far."""

    def put(self, blocks: Mapping[int, nn.Module], *, last: int) -> None:
        """Make layers offload the tensors that they save; ``blocks`` maps layer numbers to layers.

        Call it after recomputation and compilation and before parameters are sharded. Tensors of the model's ``last``
        layer stay on the device, since its backward pass follows immediately.
        """
        for number, block in blocks.items():
            if number != last:
                setattr(block, "forward", self._hooked(number, block, block.forward))  # noqa: B010 - mypy forbids it

    def _hooked(self, number: int, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            layer = self._begin(number)
            # Parameters are gathered at this point. Views of parameters are recognised by their storage.
            stays = {storage_key(tensor) for tensor in (*block.parameters(), *block.buffers())}
            stays |= {storage_key(tensor) for tensor in _shared(args, kwargs)}
            with saved_tensors_hooks(_Pack(self, layer, stays), self._unpack):
                return forward(*args, **kwargs)

        return hooked

    def _begin(self, number: int) -> _Layer:
        while len(self._leaving) > _BEHIND:
            self._let_go(self._leaving.popleft())
        layer = _Layer(self._latest.get(number - 1))
        self._latest[number] = layer
        self._leaving.append(layer)
        return layer

    def _let_go(self, layer: _Layer) -> None:
        """Free a layer's saved tensors on the device, once their copies to the host are done."""
        self._await(layer)
        for stored in layer.stored:
            stored.on_device = None

    @staticmethod
    def _await(layer: _Layer) -> None:
        if layer.copied is not None:
            layer.copied.before_compute()
            layer.copied = None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return True if a saved tensor is to be moved to host memory."""
        plain = is_plain(tensor) and tensor.layout == torch.strided
        return (
            plain and tensor.device == self._device and tensor.untyped_storage().nbytes() >= max(1, self._least_bytes)
        )

    def store(self, tensor: torch.Tensor, layer: _Layer) -> _Stored:
        """Start to copy a tensor's storage to the host."""
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        stored = _Stored(self.slabs.take(storage.numel()), storage)
        finalize(stored, self.slabs.give_back, stored.lent).atexit = False
        written = self._lanes.now()
        for part, slab in self.slabs.beside(storage, stored.lent):
            layer.copied = self._lanes.down.copy(slab, part, written)
        layer.stored.append(stored)
        self.moved_bytes += stored.size_bytes
        return stored

    def _unpack(self, packed: _Packed | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        stored, layer, like, offset = packed
        if not layer.asked:
            layer.asked = True
            self._turn(layer)
        self._fetch(stored)
        assert stored.on_device is not None
        if stored.arrived is not None:
            stored.arrived.before_compute()
            stored.arrived = stored.lent.mark = stored.lent.reads = None
        memory = torch.empty(0, dtype=like.dtype, device=self._device).set_(stored.on_device.untyped_storage())
        tensor = memory.as_strided(like.size(), like.stride(), offset)
        stored.waiting -= 1
        if stored.waiting <= 0:
            stored.on_device = None
        return tensor

    def _turn(self, layer: _Layer) -> None:
        """Begin a layer's backward pass: prefetch the offloaded tensors of this layer and of the layers before it."""
        wanted: list[_Layer] = [layer]
        while len(wanted) <= self._ahead and (before := wanted[-1].before) is not None:
            wanted.append(before)
        while self._leaving:
            leaving = self._leaving.popleft()
            self._await(leaving)
            if not any(leaving is each for each in wanted):
                self._let_go(leaving)
        for each in wanted:
            for stored in each.stored:
                if stored.waiting > 0:
                    self._fetch(stored)

    def _fetch(self, stored: _Stored) -> None:
        """Start to copy a storage to the device, unless it is already on the device."""
        if stored.on_device is not None:
            return
        # The memory comes from compute's pool and returns to it. Compute waits for the copies to the host.
        stored.on_device = torch.empty(stored.size_bytes, dtype=torch.uint8, device=self._device)
        free = self._lanes.now()
        for part, slab in self.slabs.beside(stored.on_device, stored.lent):
            stored.arrived = self._lanes.up.copy(part, slab, free)
        stored.lent.mark, stored.lent.reads = stored.arrived, stored.on_device


class _Pack:
    """Pack hook for the tensors that one pass of a layer saves; a storage that several tensors share is packed once."""

    def __init__(self, owner: Activations, layer: _Layer, stays: set[int]) -> None:
        self._owner, self._layer, self._stays = owner, layer, stays
        self._packed: dict[tuple[int, int], _Stored] = {}

    def __call__(self, tensor: torch.Tensor) -> _Packed | torch.Tensor:
        if not self._owner.takes(tensor) or storage_key(tensor) in self._stays:
            return tensor
        # A storage that was written to in between counts as a new storage: its old content is useless, and autograd
        # rejects it.
        key = (storage_key(tensor), tensor._version)
        if key not in self._packed:
            self._packed[key] = self._owner.store(tensor, self._layer)
        stored = self._packed[key]
        stored.waiting += 1
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return _Packed(stored, self._layer, like, int(tensor.storage_offset()))


def _shared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that all layers share: all tensor arguments of a layer except the first, the hidden state."""
    yield from _tensors(args[1:])
    yield from _tensors({name: value for name, value in kwargs.items() if name != "hidden_states"})


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument, which may be a tensor, a context, or a nested list, tuple or dictionary."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Context):
        yield from _tensors((value.rope, value.tokens.documents_BL))
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
