"""The exponential moving average of the weights that are trained (``training.ema``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from partool.layout.checkpoint import AVERAGE
from partool.spec.averaging import EmaSpec
from partool_runtime.torch_internals import foreach
from partool_runtime.torch_internals.tensors import local, local_bytes


class MovingAverage:
    """Averages of this rank's shards of the master weights, in their type, placed as they are.

    After each update of the weights w: average = decay · average + (1 − decay) · w (Polyak and Juditsky, SIAM J.
    Control Optim. 30 (1992), with exponential weights). A step that is skipped leaves it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: EmaSpec) -> None:
        """Take the trained parameters by name; call :meth:`restart` or fill :meth:`state` before the first update."""
        self._spec = spec
        self._weights = dict(parameters)
        with torch.no_grad():
            self._averages = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the live tensors by ``ema.<parameter>``; each has its parameter's placement."""
        return {f"{AVERAGE}.{name}": tensor for name, tensor in self._averages.items()}

    def state_bytes(self) -> int:
        """Return the bytes that this rank holds."""
        return local_bytes(self._averages.values())

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the weights as they are."""
        for average, weight in self._shards():
            average.copy_(weight)

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take in the weights after the ``updates``-th update, counted from 1."""
        if pairs := list(self._shards()):
            averages, weights = map(list, zip(*pairs, strict=True))
            foreach.lerp_(averages, weights, 1.0 - self._spec.decay_at(updates))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the averages and the weights within a ``with`` block, without a change of either.

        No parameter may be gathered when the block begins, and those that it gathers are to be released in it.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weight in self._shards():
            weights = weight.clone()
            weight.copy_(average)
            average.copy_(weights)

    def _shards(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's parts of averages and weights; of some parameters it may hold none."""
        for name, parameter in self._weights.items():
            weight = local(parameter)
            if weight.numel():
                yield local(self._averages[name]), weight
