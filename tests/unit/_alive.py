"""Bytes of the storages that operators create, while they last and at most."""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from partool_runtime.torch_internals.tensors import TorchDispatchMode, tensors_in


class Alive(TorchDispatchMode):
    """Records every storage that an operator creates while this mode is active, of fake tensors as well."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}
        self.peak_bytes = 0
        """Most bytes after any operator, since the last :meth:`restart`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference not in given:
                self._made[reference] = tensor.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        self._made = {reference: size for reference, size in self._made.items() if not reference.expired()}
        return sum(self._made.values())
