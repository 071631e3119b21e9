"""Optimizer passes by the compiled library, which processes a list of parts in one call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from partool_kernels.host.arguments import Taken, check_rules, master_of, moments_of, other_of
from partool_kernels.host.types import MOMENTS, HostKernelError, Part, StepRule, Sums, UpdatePass

if TYPE_CHECKING:
    import torch

    from partool_kernels.host.pool import Pool

BLOCK = 2**16
"""``PARTOOL_BLOCK`` of ``cpu/partool_cpu.h``; the structures below also mirror that file."""
_RULE, _PART, _SPAN = struct.Struct("=6dqii"), struct.Struct("=8Qq6iii"), struct.Struct("=4Qqii")
_KINDS = {kind: number for number, kind in enumerate(MOMENTS)}
_NO_MEMORY = -2


class _Blocks:
    """Arrays in which the library stores each block's sum of squares and finite flag."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._counts = [-(-size // BLOCK) for size in sizes]
        total = sum(self._counts)
        self._squares, self._finite = (ctypes.c_double * total)(), (ctypes.c_int32 * total)()
        self._at = 0

    def places(self, index: int) -> tuple[int, int]:
        """Return the addresses of a part's sums and flags; call this method for all parts in order, from part 0 on."""
        first, self._at = self._at, self._at + self._counts[index]
        return ctypes.addressof(self._squares) + 8 * first, ctypes.addressof(self._finite) + 4 * first

    def sums(self) -> Sums:
        """Return the sums and flags that the library has stored."""
        squares, finite, first = [], [], 0
        for count in self._counts:
            squares.append(tuple(self._squares[first : first + count]))
            finite.append(all(self._finite[first : first + count]))
            first += count
        return Sums(tuple(squares), tuple(finite))


def update(
    lib: ctypes.CDLL,
    parts: Sequence[Part],
    commit: UpdatePass | None,
    step: UpdatePass | None,
    *,
    keep: bool,
    weights: Sequence[torch.Tensor] | None,
    wants_sums: bool,
    pool: Pool | None,
) -> Sums | None:
    """See :func:`partool_kernels.host.update`; the arguments are checked by :func:`checked_parts`."""
    blocks = _Blocks([part.master.numel() for part in parts]) if wants_sums and step is not None else None
    structures = checked_parts(parts, commit, step, keep=keep, weights=weights, blocks=blocks)
    rules = [None if one is None else _rules(one.rules) for one in (commit, step)]
    groups = min(len(one.rules) for one in (commit, step) if one is not None) if commit or step else len(parts) + 1
    _check_status(lib.partool_update(_handle(pool), structures, len(parts), *rules, groups, keep))
    return None if blocks is None else blocks.sums()


def checked_parts(
    parts: Sequence[Part],
    commit: UpdatePass | None,
    step: UpdatePass | None,
    *,
    keep: bool,
    weights: Sequence[torch.Tensor] | None,
    blocks: _Blocks | None = None,
) -> bytes:
    """Return the parts as structures of the library; raises :class:`HostKernelError` for invalid arguments."""
    check_rules(parts, [one for one in (commit, step) if one is not None], weights)
    writes = commit is not None or (step is not None and keep)
    taken, structures = Taken(), bytearray(_PART.size * len(parts))
    for index, part in enumerate(parts):
        elements = part.master.numel()
        master, state = master_of(taken, index, part, writes=writes)
        (first, first_type), (second, second_type) = moments_of(taken, index, part, state, writes=writes)
        commits, commit_type = _gradient(taken, commit, index, "the gradient to commit", elements)
        steps, step_type = _gradient(taken, step, index, "the gradient", elements)
        out, out_type = other_of(taken, weights, index, "the weights", elements=elements, writes=True)
        squares, finite = (0, 0) if blocks is None else blocks.places(index)
        pointers = (master, first, second, commits, steps, out, squares, finite)
        types = (state, first_type, second_type, commit_type, step_type, out_type)
        group = part.group if commit is not None or step is not None else 0
        _PART.pack_into(structures, index * _PART.size, *pointers, elements, *types, group, 0)
    taken.check()
    return bytes(structures)


def sums(lib: ctypes.CDLL, gradients: Sequence[torch.Tensor], pool: Pool | None) -> Sums:
    """See :func:`partool_kernels.host.sums`."""
    blocks = _Blocks([gradient.numel() for gradient in gradients])
    structures = checked_sources(gradients, blocks)
    _check_status(lib.partool_sums(_handle(pool), structures, len(gradients)))
    return blocks.sums()


def checked_sources(gradients: Sequence[torch.Tensor], blocks: _Blocks | None = None) -> bytes:
    """Return the gradients as structures of the library; raises :class:`HostKernelError` for invalid gradients."""
    taken, structures = Taken(), bytearray(_SPAN.size * len(gradients))
    for index, gradient in enumerate(gradients):
        source, code = other_of(taken, gradients, index, "the gradient", elements=None, writes=False)
        places = (0, 0) if blocks is None else blocks.places(index)
        _SPAN.pack_into(structures, index * _SPAN.size, 0, source, *places, gradient.numel(), -1, code)
    return bytes(structures)


def spans(into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor] | None) -> bytes:
    """Return the tensors ``into`` and their ``sources`` as structures of the library.

    Raises :class:`HostKernelError` for tensors that do not fit.
    """
    if sources is not None and len(sources) != len(into):
        raise HostKernelError(f"{len(sources)} tensors to go into {len(into)}")
    taken, structures = Taken(), bytearray(_SPAN.size * len(into))
    for index, total in enumerate(into):
        to, to_type = other_of(taken, into, index, "the total", elements=None, writes=True)
        source, code = other_of(taken, sources, index, "the source", elements=total.numel(), writes=False)
        _SPAN.pack_into(structures, index * _SPAN.size, to, source, 0, 0, total.numel(), to_type, code)
    taken.check()
    return bytes(structures)


def accumulate(lib: ctypes.CDLL, structures: bytes, *, first: bool, pool: Pool | None) -> None:
    """See :func:`partool_kernels.host.accumulate`; ``structures`` come from :func:`spans`."""
    function = lib.partool_convert if first else lib.partool_accumulate
    _check_status(function(_handle(pool), structures, len(structures) // _SPAN.size))


def zero(lib: ctypes.CDLL, structures: bytes, *, pool: Pool | None) -> None:
    """See :func:`partool_kernels.host.zero`."""
    _check_status(lib.partool_zero(_handle(pool), structures, len(structures) // _SPAN.size))


def _gradient(taken: Taken, one: UpdatePass | None, index: int, what: str, elements: int) -> tuple[int, int]:
    tensors = None if one is None else one.gradients
    return other_of(taken, tensors, index, what, elements=elements, writes=False)


def _rules(rules: Sequence[StepRule]) -> bytes:
    return b"".join(
        _RULE.pack(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, r.scale, r.step, _KINDS[r.kind], 0) for r in rules
    )


def _handle(pool: Pool | None) -> int | None:
    return None if pool is None else pool.handle


def _check_status(status: int) -> None:
    if status == _NO_MEMORY:
        raise MemoryError("no memory for the list of blocks of a pass")
    if status != 0:
        raise HostKernelError("the compiled library refused a pass")
