"""One pass over optimizer states commits a verified step, computes the next step, and writes weights for compute."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from partool_kernels import _native
from partool_kernels.host import native, reference
from partool_kernels.host.arguments import check_rules
from partool_kernels.host.types import Mode, Part, Sums, UpdatePass
from partool_kernels.reductions import KernelUnavailableError

if TYPE_CHECKING:
    import torch

    from partool_kernels.host.pool import Pool


def update(
    parts: Sequence[Part],
    *,
    commit: UpdatePass | None = None,
    step: UpdatePass | None = None,
    keep: bool = True,
    weights: Sequence[torch.Tensor] | None = None,
    wants_sums: bool = False,
    pool: Pool | None = None,
    mode: Mode = "auto",
) -> Sums | None:
    """Pass once over the states of ``parts``.

    First ``commit``, an earlier step whose factor for gradients is known by now, updates masters and moments. Then
    ``step`` is computed from the updated masters and moments. With ``keep`` the step updates masters and moments.
    Without ``keep`` it writes only ``weights``; a later call with this step as ``commit`` gives the same bits. The
    resulting masters are written to ``weights``, of any floating-point type, rounded to nearest (ties to even), also if
    there is no ``step``. With ``wants_sums`` return the sums of squares of the step's gradients.

    Raises :class:`HostKernelError` for arguments that do not fit, before anything is touched, and
    :class:`partool_kernels.KernelUnavailableError` where ``mode`` is ``native`` and there is no compiled library.
    """
    if pool is not None and pool.idle:
        check_rules(parts, [one for one in (commit, step) if one is not None], weights)
        return _no_sums([part.master for part in parts]) if wants_sums and step is not None else None
    lib = _library(mode)
    if lib is None:
        native.checked_parts(parts, commit, step, keep=keep, weights=weights)
        return reference.update(parts, commit, step, keep=keep, weights=weights, wants_sums=wants_sums)
    return native.update(lib, parts, commit, step, keep=keep, weights=weights, wants_sums=wants_sums, pool=pool)


def sums(gradients: Sequence[torch.Tensor], *, pool: Pool | None = None, mode: Mode = "auto") -> Sums:
    """Return the sums of squares of gradients and whether the gradients are finite; raises as :func:`update` does."""
    if pool is not None and pool.idle:
        return _no_sums(gradients)
    lib = _library(mode)
    if lib is None:
        native.checked_sources(gradients)
        return reference.sums(gradients)
    return native.sums(lib, gradients, pool)


def accumulate(
    into: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    first: bool,
    pool: Pool | None = None,
    mode: Mode = "auto",
) -> None:
    """Add gradients to the tensors ``into``; with ``first`` replace the content of these tensors.

    Without ``first`` the type of ``into`` has at least as many bits as the gradients' type. With ``first`` any type
    may be converted to any other type, rounded to nearest even. Raises as :func:`update` does.
    """
    if pool is not None and pool.idle:
        return
    structures = native.spans(into, gradients)
    lib = _library(mode)
    if lib is None:
        reference.accumulate(into, gradients, first=first)
    else:
        native.accumulate(lib, structures, first=first, pool=pool)


def zero(tensors: Sequence[torch.Tensor], *, pool: Pool | None = None, mode: Mode = "auto") -> None:
    """Write zeros; each thread of the pool writes the range that it will process in later passes over the tensors.

    Memory is placed on the NUMA node of the thread that writes it first. Raises as :func:`update` does.
    """
    if pool is not None and pool.idle:
        return
    structures = native.spans(tensors, None)
    lib = _library(mode)
    if lib is None:
        for tensor in tensors:
            tensor.zero_()
    else:
        native.zero(lib, structures, pool=pool)


def _no_sums(gradients: Sequence[torch.Tensor]) -> Sums:
    return Sums(tuple((0.0,) for _ in gradients), (True,) * len(gradients))


def _library(mode: Mode) -> ctypes.CDLL | None:
    lib = None if mode == "torch" else _native.library()
    if lib is None and mode == "native":
        raise KernelUnavailableError("the compiled CPU library is missing; install where a C++ compiler is present")
    return lib
