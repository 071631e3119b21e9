"""Memory of this process and its device, and of tensors that autograd saves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not report it."""
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory: the CUDA allocator's peak on a GPU, else the peak of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int | None:
    try:
        text = _STATUS.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    for line in text.splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


class SavedTensors:
    """Counts the bytes that autograd saves between :meth:`start` and :meth:`stop`, each storage once.

    The hooks return every tensor unchanged. Parameters and views of them are not counted; neither are logits,
    which belong to the term ``loss`` and are recognised by their shape (``logits_numel`` elements, last dimension
    ``vocab``). Tensors that recomputation saves again during the backward pass are not seen. ``at_parameter`` is called
    whenever a parameter is saved, which happens in the middle of the work on its block.
    """

    def __init__(self, vocab: int, logits_numel: int, at_parameter: Callable[[], None]) -> None:
        self._at_parameter = at_parameter
        self._vocab = vocab
        self._logits_numel = logits_numel
        self._storages: dict[tuple[int, int], StorageWeakRef] = {}
        self._hooks = saved_tensors_hooks(self._pack, _same)

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that were saved and have not been freed yet."""
        self._storages = {key: storage for key, storage in self._storages.items() if not storage.expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._storages)

    def start(self) -> None:
        """Start counting."""
        self._hooks.__enter__()

    def stop(self) -> None:
        """Stop counting; saved tensors stay valid."""
        self._hooks.__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        owner = tensor if tensor._base is None else tensor._base
        # Leaves of three dimensions are inputs that a pipeline stage received, [B, S, H]; weights have at most two.
        is_parameter = isinstance(owner, torch.nn.Parameter) or (
            owner.is_leaf and owner.requires_grad and owner.ndim < 3
        )
        is_logits = tensor.numel() == self._logits_numel and tensor.shape[-1] == self._vocab
        if is_parameter:
            self._at_parameter()
        elif not is_logits:
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr(), storage.nbytes()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
