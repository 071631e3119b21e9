"""A step of each optimizer by torch's own operators, on the shards of one group of parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from partool_kernels.host import StepRule
from partool_runtime.torch_internals import foreach
from partool_runtime.torch_internals.tensors import fused_adamw

PIECE_ELEMENTS = 2**24
"""Number of elements that are updated at once; each temporary of operators has this size, 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Lists of tensors that correspond by index; all tensors are on one device and none is empty."""

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    moments: Sequence[list[torch.Tensor]]
    """Moments in the order of the optimizer's record in :data:`partool.strategies.optimizers.OPTIMIZERS`."""

    def pieces(self) -> Iterator[Shards]:
        """Yield parts of at most :data:`PIECE_ELEMENTS` elements in total; non-contiguous tensors are not cut."""
        rows: list[tuple[torch.Tensor, ...]] = []
        room = PIECE_ELEMENTS
        for row in self._rows():
            for piece in _cut(row):
                if rows and piece[0].numel() > room:
                    yield _from_rows(rows)
                    rows, room = [], PIECE_ELEMENTS
                rows.append(piece)
                room -= piece[0].numel()
        if rows:
            yield _from_rows(rows)

    def cuts(self) -> list[int]:
        """Return the number of pieces into which :meth:`pieces` cuts each of the tensors."""
        return [len(_cut(row)) for row in self._rows()]

    def _rows(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return zip(self.weights, self.gradients, *self.moments, strict=True)


def _cut(row: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
    if not all(tensor.is_contiguous() for tensor in row):
        return [row]
    return list(zip(*(torch.split(tensor.view(-1), PIECE_ELEMENTS) for tensor in row), strict=True))


def _from_rows(rows: Sequence[tuple[torch.Tensor, ...]]) -> Shards:
    weights, gradients, *moments = (list(column) for column in zip(*rows, strict=True))
    return Shards(weights, gradients, moments)


def step(shards: Shards, rule: StepRule) -> None:
    """Update weights and moments in place; gradients are scaled in place.

    See :class:`partool_kernels.host.StepRule` for the optimizers' arithmetic. The operators and their order are the
    same as in the host's passes through torch, so both give the same bits, except for adamw, which here is torch's
    fused kernel.
    """
    if rule.scale != 1.0:
        foreach.mul_(shards.gradients, rule.scale)
    STEPS[rule.kind](shards, rule)


def _adamw(shards: Shards, rule: StepRule) -> None:
    # The step count is filled on the device: a copy from the host would wait for all earlier work.
    count = torch.full((), float(rule.step), dtype=torch.float32, device=shards.weights[0].device)
    first, second = shards.moments
    fused_adamw(
        shards.weights,
        shards.gradients,
        first,
        second,
        count,
        lr=rule.lr,
        betas=(rule.beta1, rule.beta2),
        weight_decay=rule.weight_decay,
        eps=rule.eps,
    )


def _decay(shards: Shards, rule: StepRule) -> None:
    if rule.weight_decay:
        foreach.mul_(shards.weights, 1.0 - rule.lr * rule.weight_decay)


def _lion(shards: Shards, rule: StepRule) -> None:
    _decay(shards, rule)
    for piece in shards.pieces():
        (momentum,) = piece.moments
        directions = foreach.mul(momentum, rule.beta1)
        foreach.add_(directions, piece.gradients, alpha=1.0 - rule.beta1)
        foreach.sign_(directions)
        foreach.add_(piece.weights, directions, alpha=-rule.lr)
        foreach.mul_(momentum, rule.beta2)
        foreach.add_(momentum, piece.gradients, alpha=1.0 - rule.beta2)


def _adagrad(shards: Shards, rule: StepRule) -> None:
    _decay(shards, rule)
    for piece in shards.pieces():
        (sums,) = piece.moments
        foreach.addcmul_(sums, piece.gradients, piece.gradients)
        roots = foreach.sqrt(sums)
        foreach.add_(roots, rule.eps)
        foreach.addcdiv_(piece.weights, piece.gradients, roots, value=-rule.lr)


def _sgd(shards: Shards, rule: StepRule) -> None:
    _decay(shards, rule)
    (momentum,) = shards.moments
    foreach.mul_(momentum, rule.beta1)
    foreach.add_(momentum, shards.gradients)
    foreach.add_(shards.weights, momentum, alpha=-rule.lr)


STEPS: dict[str, Callable[[Shards, StepRule], None]] = {
    "adamw": _adamw,
    "lion": _lion,
    "adagrad": _adagrad,
    "sgd": _sgd,
}
"""Step functions by the optimizer's name; each also applies weight decay."""
