"""Where packed documents begin and end, known to the host, so that no work is done between two of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from partool_runtime.torch_internals.tensors import writes

SHORT = 512
"""Tokens up to which documents are taken together, and told apart by masks: a call of a kernel for each costs more."""


class Stretch(NamedTuple):
    """Neighbouring tokens of a sequence which see nothing before them, and are not seen behind them."""

    start: int
    stop: int
    alone: bool
    """They are of one document."""


_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By tensor of documents: all layers of a pass are given the same one, and it is fetched from a device once.

With it how often the tensor had been written to: what is known of one that is filled anew is out of date.
"""


def stretches(documents_BL: torch.Tensor) -> tuple[tuple[Stretch, ...], ...] | None:
    """Return those of every sequence, in order; None where a number comes back behind another one."""
    version = writes(documents_BL)
    if documents_BL not in _KNOWN or _KNOWN[documents_BL][0] != version:
        _KNOWN[documents_BL] = version, _stretches(documents_BL)
    found: tuple[tuple[Stretch, ...], ...] | None = _KNOWN[documents_BL][1]
    return found


def _stretches(documents_BL: torch.Tensor) -> tuple[tuple[Stretch, ...], ...] | None:
    documents_BL = documents_BL.cpu()
    steps = documents_BL.diff(dim=1)
    if bool((steps < 0).any()):
        return None
    return tuple(_grouped(steps_L.nonzero().flatten().tolist(), documents_BL.shape[1]) for steps_L in steps)


def _grouped(last: list[int], length: int) -> tuple[Stretch, ...]:
    """Return the stretches of a sequence by the last tokens of all documents but the last."""
    found: list[Stretch] = []
    start = 0
    for stop in [*(place + 1 for place in last), length]:
        if found and stop - found[-1].start <= SHORT:
            found[-1] = Stretch(found[-1].start, stop, alone=False)
        else:
            found.append(Stretch(start, stop, alone=True))
        start = stop
    return tuple(found)
