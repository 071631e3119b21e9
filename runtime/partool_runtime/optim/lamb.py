"""LAMB's steps: Adam's direction, scaled by the norms of the whole matrix (You et al., arXiv 1904.00962, algorithm 2).

Steps read memory twice. The first pass updates the moments and adds up squares of weights and directions; the second
one computes the directions again and applies them, once the ranks that hold parts of a matrix have added up their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt

import torch

from partool.spec.training import OptimizerSpec
from partool_kernels.host import StepRule
from partool_runtime.optim.groups import ParameterGroups
from partool_runtime.optim.steps import Shards
from partool_runtime.optim.whole_norms import WholeNorms, WholePart
from partool_runtime.torch_internals import foreach

Tensors = list[torch.Tensor]


def advance(gradients: Tensors, moments: Sequence[Tensors], rule: StepRule) -> None:
    """Update Adam's two moments in place, by gradients that are scaled already."""
    first, second = moments
    foreach.lerp_(first, gradients, 1.0 - rule.beta1)
    foreach.mul_(second, rule.beta2)
    foreach.addcmul_(second, gradients, gradients, value=1.0 - rule.beta2)


def directions(weights: Tensors, moments: Sequence[Tensors], rule: StepRule) -> Tensors:
    """Return Adam's directions from moments that are up to date, with bias correction and weight decay."""
    first, second = moments
    # m̂ / (√v̂ + ε) is c m / (√v + ε √(1 − β₂ᵗ)) for c = √(1 − β₂ᵗ) / (1 − β₁ᵗ).
    root = sqrt(1.0 - rule.beta2**rule.step)
    factor = root / (1.0 - rule.beta1**rule.step)
    roots = list(foreach.sqrt(second))
    foreach.add_(roots, rule.eps * root)
    if not rule.weight_decay:
        moves = list(foreach.div(first, roots))
        foreach.mul_(moves, factor)
        return moves
    moves = list(foreach.mul(weights, rule.weight_decay))
    foreach.addcdiv_(moves, first, roots, value=factor)
    return moves


def squares(tensors: Tensors) -> torch.Tensor:
    """Return the sum of squares of each tensor, in float64."""
    return torch.stack(list(foreach.norm(tensors, 2, torch.float64))).square()


def ratios(
    weight_squares: torch.Tensor, direction_squares: torch.Tensor, bounds: Sequence[float] | None = None
) -> torch.Tensor:
    """Return φ(‖w‖) / ‖u‖ for sums of squares of weights w and directions u; 1 where one of the norms is 0.

    φ limits a norm to ``bounds``, lowest and highest; None: it leaves the norm as it is.
    """
    weights, moves = weight_squares.sqrt(), direction_squares.sqrt()
    sizes = weights if bounds is None else weights.clamp(*bounds)
    return torch.where((weights > 0) & (moves > 0), sizes / moves, 1.0)


class LambSteps:
    """Makes LAMB's steps of this rank's shards; a step is a collective of the ranks that hold parts of matrices."""

    def __init__(
        self, spec: OptimizerSpec, groups: ParameterGroups, shard_names: Sequence[Sequence[str]], norms: WholeNorms
    ) -> None:
        """``shard_names`` are the names of this rank's parameters that are not empty, by group.

        ``norms`` knows those of them whose steps are scaled by norms.
        """
        self._norms = norms.ordered(groups.of)
        self._bounds = spec.norm_bounds
        self._parts: list[list[WholePart]] = [[] for _ in shard_names]
        for part in self._norms.parts:
            self._parts[groups.of[part.name]].append(part)
        scaled = {part.name for part in self._norms.parts}
        self._plain = [[name for name in names if name not in scaled] for names in shard_names]
        self.ratios: dict[str, torch.Tensor] = {}
        """Ratios of the last step by parameter; of a stack of matrices that of the last one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters whose steps are scaled by norms."""
        return tuple(dict.fromkeys(part.name for parts in self._parts for part in parts))

    def step(self, shards_of: Callable[[list[str]], Shards], rules: Sequence[StepRule]) -> None:
        """Update weights and moments in place; gradients are scaled in place."""
        steps, sums = [], [torch.zeros(2, 0, dtype=torch.float64, device=self._norms.device)]
        for rule, plain, parts in zip(rules, self._plain, self._parts, strict=True):
            if plain:
                _plain_step(_scaled(shards_of(plain), rule), rule)
            if parts:
                names = list(dict.fromkeys(part.name for part in parts))
                shards = self._norms.cut(_scaled(shards_of(names), rule), names, parts)
                sums.append(_first_pass(shards, rule))
                steps.append((shards, rule))
        norms = self._norms.add_up(torch.cat(sums, dim=1))
        by_part = ratios(norms[0], norms[1], self._bounds)
        names = [part.name for parts in self._parts for part in parts]
        self.ratios = dict(zip(names, by_part.unbind(), strict=True))
        each = torch.split(by_part, [len(shards.weights) for shards, _ in steps])
        for (shards, rule), of_group in zip(steps, each, strict=True):
            _second_pass(shards, rule, of_group)


def _scaled(shards: Shards, rule: StepRule) -> Shards:
    if rule.scale != 1.0:
        foreach.mul_(shards.gradients, rule.scale)
    return shards


def _plain_step(shards: Shards, rule: StepRule) -> None:
    """Update parameters whose ratio is 1."""
    for piece in shards.pieces():
        advance(piece.gradients, piece.moments, rule)
        foreach.add_(piece.weights, directions(piece.weights, piece.moments, rule), alpha=-rule.lr)


def _first_pass(shards: Shards, rule: StepRule) -> torch.Tensor:
    """Update the moments; return the sums of squares of weights (row 0) and directions (row 1) of each tensor."""
    square_sums = []
    for piece in shards.pieces():
        advance(piece.gradients, piece.moments, rule)
        moves = directions(piece.weights, piece.moments, rule)
        square_sums.append(torch.stack([squares(piece.weights), squares(moves)]))
        del moves  # frees its memory before the next piece takes as much
    sums, cuts = torch.cat(square_sums, dim=1), shards.cuts()
    if sums.shape[1] == len(cuts):
        return sums
    return torch.stack([part.sum(dim=1) for part in torch.split(sums, cuts, dim=1)], dim=1)


def _second_pass(shards: Shards, rule: StepRule, each: torch.Tensor) -> None:
    """Apply the directions of each tensor, times its ratio."""
    of_tensors = each.to(shards.weights[0].dtype).unbind()
    of_pieces = iter([ratio for ratio, cuts in zip(of_tensors, shards.cuts(), strict=True) for _ in range(cuts)])
    for piece in shards.pieces():
        moves = directions(piece.weights, piece.moments, rule)
        foreach.addcmul_(piece.weights, moves, [next(of_pieces) for _ in moves], value=-rule.lr)
        del moves  # frees its memory before the next piece takes as much
