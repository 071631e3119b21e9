"""How a frozen matrix is stored in few bits, as pure data: which matrices, in which tensors, in how many bytes.

In place of ``layers.{i}.attention.q.weight [O, I]`` lie ``layers.{i}.attention.q.codes``, ``….absmax`` and, with double
quantisation, ``….seconds``, which is small and whole on each rank. Codes and scales are cut by rows as the matrix is; a
block of columns that two tensor ranks share has its scale on both. The formats are those of
``partool_kernels.quantised.codes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partool.layout.parameters import ParameterInfo, is_frozen, parameters, projection_of
from partool.spec.adapter import LowRank
from partool.spec.model import ModelConfig

NF4_BLOCK = 64
"""Elements of a row that share a scale; the last block of a row may have fewer."""
SCALES_BLOCK = 256
"""Scales that share a scale with double quantisation."""
CODES, ABSMAX, SECONDS = "codes", "absmax", "seconds"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in which a part of a matrix is stored."""

    name: str
    """One of :data:`CODES`, :data:`ABSMAX` and :data:`SECONDS`."""
    shape: tuple[int, ...]
    element_bytes: int
    integers: bool
    """True if its elements are integers, False if they are float32."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the tensor."""
        size = self.element_bytes
        for each in self.shape:
            size *= each
        return size


def is_quantised(info: ParameterInfo, adapter: LowRank | None, frozen: Iterable[str]) -> bool:
    """Return True if a parameter is stored in few bits: the frozen matrices of all projections of the layers.

    Embeddings, head, norms, biases and routers stay in the type of computation, as in QLoRA and PEFT, which quantise
    the linear layers but for the head.
    """
    if adapter is None or adapter.base == "bf16":
        return False
    return projection_of(info) is not None and is_frozen(info.name, frozen)


def quantised_names(model: ModelConfig, frozen: Iterable[str]) -> frozenset[str]:
    """Return the names of the whole model's matrices that are stored in few bits."""
    patterns = tuple(frozen)
    return frozenset(info.name for info in parameters(model) if is_quantised(info, model.adapter, patterns))


def stored_tensors(adapter: LowRank, shape: Sequence[int]) -> tuple[StoredTensor, ...]:
    """Return the tensors in which a matrix ``[O, I]`` is stored."""
    rows, columns = shape
    if adapter.base == "int8":
        return StoredTensor(CODES, (rows, columns), 1, True), StoredTensor(ABSMAX, (rows, 1), 4, False)
    blocks = -(-columns // NF4_BLOCK)
    codes = StoredTensor(CODES, (rows, -(-columns // 2)), 1, True)
    if not adapter.double_quant:
        return codes, StoredTensor(ABSMAX, (rows, blocks), 4, False)
    seconds = StoredTensor(SECONDS, (-(-rows * blocks // SCALES_BLOCK) + 1,), 4, False)
    return codes, StoredTensor(ABSMAX, (rows, blocks), 1, True), seconds


def stored_bytes(adapter: LowRank, shape: Sequence[int]) -> int:
    """Return the bytes in which a matrix ``[O, I]`` is stored."""
    return sum(tensor.size_bytes for tensor in stored_tensors(adapter, shape))


class FewBits(NamedTuple):
    """What decides in how many bytes each parameter is stored."""

    adapter: LowRank
    frozen: tuple[str, ...]
    compute_bytes: int
    """Bytes of an element in the type of computation."""

    def elements(self, info: ParameterInfo) -> float:
        """Return the number of elements in the type of computation that take as many bytes as the parameter."""
        if not is_quantised(info, self.adapter, self.frozen):
            return info.elements
        return stored_bytes(self.adapter, info.shape) / self.compute_bytes


def weighed(info: ParameterInfo, few_bits: FewBits | None) -> float:
    """Return a parameter's elements, or with matrices of few bits those of :meth:`FewBits.elements`."""
    return info.elements if few_bits is None else few_bits.elements(info)
