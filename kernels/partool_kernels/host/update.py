"""One pass over optimizer states: commit what is verified, step, and write the weights that compute reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partool_kernels.host import reference
from partool_kernels.host.types import Mode, Part, Pass, Sums

if TYPE_CHECKING:
    import torch

    from partool_kernels.host.pool import Pool


def update(
    parts: Sequence[Part],
    *,
    commit: Pass | None = None,
    step: Pass | None = None,
    keep: bool = True,
    weights: Sequence[torch.Tensor] | None = None,
    wants_sums: bool = False,
    pool: Pool | None = None,
    mode: Mode = "auto",
) -> Sums | None:
    """Pass once over the states of ``parts``.

    First ``commit`` is applied to masters and moments: a step whose coefficient is known by now. Then ``step`` is
    computed from these; with ``keep`` masters and moments are updated, without it they are left and only the updated
    ``weights`` are written: a later ``commit`` of the same pass gives the same bits. ``weights``, of any floating-point
    type, get the updated masters, rounded to nearest even, or the masters themselves where there is no ``step``.
    With ``wants_sums`` return the sums of squares of the step's gradients.

    Raises :class:`HostKernelError` for arguments that do not fit, before anything is touched, and
    :class:`partool_kernels.KernelUnavailableError` where ``mode`` is native and there is no compiled library.
    """
    return reference.update(parts, commit, step, keep=keep, weights=weights, wants_sums=wants_sums)


def sums(gradients: Sequence[torch.Tensor], *, pool: Pool | None = None, mode: Mode = "auto") -> Sums:
    """Return the sums of squares of gradients and whether they are finite."""
    return reference.sums(gradients)


def accumulate(
    into: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    first: bool,
    pool: Pool | None = None,
    mode: Mode = "auto",
) -> None:
    """Add gradients to ``into``, of a type at least as wide; with ``first`` replace what is there."""
    for total, gradient in zip(into, gradients, strict=True):
        total.copy_(gradient) if first else total.add_(gradient)
