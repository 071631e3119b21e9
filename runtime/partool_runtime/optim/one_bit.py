"""0/1 Adam: AdamW whose data-parallel ranks mostly exchange one bit per parameter, or nothing.

Lu et al., arXiv 2202.06009, algorithm 1. Steps that average gradients in full precision are AdamW's. In all other steps
a rank's move is its momentum times the learning rate, summed since the last exchange; the moves are averaged with one
bit per element, and all ranks go on from the weights of the last exchange. Where it differs from the paper and from
DeepSpeed: bias correction counts the updates of each moment, weight decay acts on the weights and never enters the
moves, and weights whose variance is zero do not move, which needs no mask. A step that updates the variance is a whole
step of AdamW, as in DeepSpeed; the paper's sends one bit as well, and divides by the variance before the update.

A scale is of consecutive elements of a tensor as the rank holds it. Tensor ranks hold parts of matrices, so results
depend on the tensor degree.

With LAMB's steps in place of AdamW's it is 1-bit LAMB (Li et al., arXiv 2104.06069) in the same scheme: full steps are
LAMB's, and all others scale a parameter's moves by the mean of the ratios of full steps, which all ranks have alike.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from partool.layout.one_bit import LOCAL, buckets
from partool.spec.training import OptimizerSpec
from partool.strategies.optimizers import OPTIMIZERS
from partool_kernels.host import StepRule
from partool_runtime.exchanges import Exchanges
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.optim.one_bit_mean import OneBitMean
from partool_runtime.optim.types import OptimizerNumbers
from partool_runtime.optim.whole_norms import WholeNorms
from partool_runtime.pieces import FlatPlaced, Placed, Value
from partool_runtime.placement import Placement, full_placement
from partool_runtime.torch_internals.tensors import local, local_bytes

_RATIO_DECAY = 0.9
"""Weight of the mean so far in the mean of LAMB's ratios: the default of DeepSpeed's ``coeff_beta``."""


class OneBitOptimizer(DeviceOptimizer):
    """Updates this rank's weights by the spec's optimizer; see :class:`partool_runtime.optim.types.Optimizer`.

    ``group`` has the data-parallel ranks, None if there is one; each of them holds all of ``parameters``. Gradients are
    sums over these ranks in steps of the kind ``full``, and this rank's own in all others. ``placements`` are those of
    parameters of which tensor ranks hold parts.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimizerSpec,
        copies: Collection[str] = (),
        *,
        exchanges: Exchanges,
        group: dist.ProcessGroup | None,
        placements: Mapping[str, Placement],
        kernels: str = "torch",
        norms: WholeNorms | None = None,
    ) -> None:
        steps = OPTIMIZERS[spec.name].whole_steps
        super().__init__(parameters, spec.model_copy(update={"name": steps}), copies, kernels=kernels, norms=norms)
        self._exchanges, self._placements = exchanges, placements
        self._names = [name for name, p in parameters.items() if local(p).numel() > 0]
        self._buckets = buckets([local(parameters[name]).numel() for name in self._names])
        dtype = local(next(iter(parameters.values()))).dtype if parameters else torch.float32
        self._mean = OneBitMean(self._buckets, group, device=self._device, dtype=dtype, kernels=kernels)
        self.variance_updates = 0
        """Number of updates of the variance; checkpoints hold it."""
        several = exchanges.schedule.local_most > 1
        self._moves = [self._flat(number) for number in range(len(self._buckets))] if several else []
        """Moves since the last exchange, by bucket; empty if ranks exchange in every step."""
        self._anchors = {name: torch.zeros_like(local(parameters[name])) for name in self._names if several}
        """Weights after the last exchange."""
        self._pending = 0
        """Number of steps since the last exchange."""
        self._rates = [0.0] * len(self._groups.groups)
        """Sum of the momentum's factors in the moves since the last exchange, by group."""
        self._decays: list[list[float]] = [[] for _ in self._groups.groups]
        """Learning rate times weight decay of each step since the last exchange, by group."""
        scaled = () if self._lamb is None else self._lamb.names
        self._ratios = {name: torch.ones((), dtype=dtype, device=self._device) for name in scaled}
        """Mean over full steps of the factor by which LAMB scales a parameter's steps; 1 for all others."""
        self._saved_errors: dict[str, torch.Tensor] = {}
        """Errors of all ranks of a checkpoint that other numbers of ranks have saved, until :meth:`loaded`."""

    @torch.no_grad()
    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update with gradients times ``scale``; the gradients may be scaled in place.

        Gradients of one rank stand for the sum over all ranks, and so are multiplied by the number of ranks.
        """
        if self._exchanges.kind == "full":
            self._full(lr, scale)
            return
        self.updates += 1
        rules = self._groups.rules(lr, self.updates, scale * self._mean.ranks)
        for name in self._names:
            rule = rules[self._groups.of[name]]
            gradient = self._gradient(name)
            if rule.scale != 1.0:
                gradient.mul_(rule.scale)
            self._moment("exp_avg", name).lerp_(gradient, 1.0 - rule.beta1)
        if self._exchanges.kind == LOCAL:
            self._move(rules)
        else:
            self._exchange(rules)

    @torch.no_grad()
    def skip(self) -> None:
        """Drop the step; moves of earlier steps are exchanged if the step is to leave all ranks with equal weights."""
        if self._exchanges.kind == "one_bit" and self._pending:
            self._exchange(None)

    def _full(self, lr: float, scale: float) -> None:
        """Make a step of AdamW or LAMB; the variance may have had fewer updates than the momentum.

        LAMB counts the momentum's for both: a common factor of a matrix's directions changes little of its steps.
        """
        self.variance_updates += 1
        if self._lamb is not None or self.variance_updates == self.updates + 1:
            super().step(lr, scale)
            self._note_ratios()
            return
        self.updates += 1
        rules = self._groups.rules(lr, self.updates, scale)
        for name in self._names:
            rule, gradient = rules[self._groups.of[name]], self._gradient(name)
            if rule.scale != 1.0:
                gradient.mul_(rule.scale)
            momentum = self._moment("exp_avg", name).lerp_(gradient, 1.0 - rule.beta1)
            self._moment("exp_avg_sq", name).mul_(rule.beta2).addcmul_(gradient, gradient, value=1.0 - rule.beta2)
            weight = local(self._parameters[name])
            weight.mul_(1.0 - rule.lr * rule.weight_decay)
            weight.addcdiv_(momentum, self._denominator(name, rule), value=-_factor(rule))

    def _note_ratios(self) -> None:
        """Take the ratios of LAMB's last step into their means; the first ones are the means so far."""
        for name, ratio in ({} if self._lamb is None else self._lamb.ratios).items():
            mean = self._ratios[name]
            mean.lerp_(ratio.to(mean.dtype), 1.0 if self.variance_updates == 1 else 1.0 - _RATIO_DECAY)

    def _move(self, rules: Sequence[StepRule]) -> None:
        """Move this rank's weights by its own momentum."""
        for bucket, moves in enumerate(self._moves):
            for name, move in self._views(bucket, moves):
                rule, weight = rules[self._groups.of[name]], local(self._parameters[name])
                if not self._pending:
                    self._anchors[name].copy_(weight)
                momentum = self._moment("exp_avg", name)
                move.add_(momentum, alpha=_factor(rule))
                weight.mul_(self._kept(name, [rule.lr * rule.weight_decay]))
                weight.addcdiv_(self._scaled(name, momentum), self._denominator(name, rule), value=-_factor(rule))
        self._count(rules)

    def _exchange(self, rules: Sequence[StepRule] | None) -> None:
        """Average the moves since the last exchange, and move all ranks' weights by them; None adds no move."""
        if rules is not None:
            self._count(rules)
        settled = rules or self._groups.rules(0.0, max(self.updates, 1), 1.0)
        means = self._mean.means(self._given(bucket, rules) for bucket in range(len(self._buckets)))
        for bucket, mean in enumerate(means):
            for name, move in self._views(bucket, mean):
                group = self._groups.of[name]
                weight, denominator = local(self._parameters[name]), self._denominator(name, settled[group])
                if name in self._anchors and self._pending > (rules is not None):
                    weight.copy_(self._anchors[name])
                weight.mul_(self._kept(name, self._decays[group]))
                weight.addcdiv_(self._scaled(name, move), denominator, value=-1.0)
                momentum = self._moment("exp_avg", name)
                rate = self._rates[group]
                torch.mul(move, 1.0 / rate if rate else 0.0, out=momentum)
                momentum.masked_fill_(self._moment("exp_avg_sq", name) == 0.0, 0.0)
        for moves in self._moves:
            moves.zero_()
        self._pending = 0
        self._rates, self._decays = [0.0] * len(self._rates), [[] for _ in self._decays]

    def _given(self, bucket: int, rules: Sequence[StepRule] | None) -> torch.Tensor:
        """Return a bucket's moves since the last exchange; those of ``rules`` are added first."""
        moves = self._moves[bucket] if self._moves else self._flat(bucket)
        for name, move in self._views(bucket, moves):
            if rules is not None:
                move.add_(self._moment("exp_avg", name), alpha=_factor(rules[self._groups.of[name]]))
            # A weight whose gradients were always zero does not move: its sign would take part in its chunk's scale.
            move.masked_fill_(self._moment("exp_avg_sq", name) == 0.0, 0.0)
        return moves

    def _count(self, rules: Sequence[StepRule]) -> None:
        self._pending += 1
        self._rates = [rate + _factor(rule) for rate, rule in zip(self._rates, rules, strict=True)]
        for decays, rule in zip(self._decays, rules, strict=True):
            decays.append(rule.lr * rule.weight_decay)

    def _kept(self, name: str, decays: Sequence[float]) -> float | torch.Tensor:
        """Return what weight decay leaves of a parameter's weights; LAMB scales decay as it scales the step."""
        kept: float | torch.Tensor = 1.0
        for decay in decays:
            kept = kept * (1.0 - self._ratios.get(name, 1.0) * decay)
        return kept

    def _scaled(self, name: str, move: torch.Tensor) -> torch.Tensor:
        """Return a parameter's move as LAMB scales it."""
        return move * self._ratios[name] if name in self._ratios else move

    def _denominator(self, name: str, rule: StepRule) -> torch.Tensor:
        """Return AdamW's denominator, or infinity where no gradient has ever been other than zero."""
        variance = self._moment("exp_avg_sq", name)
        correction = math.sqrt(1.0 - rule.beta2 ** max(self.variance_updates, 1))
        return variance.sqrt().div_(correction).add_(rule.eps).masked_fill_(variance == 0.0, math.inf)

    def _moment(self, kind: str, name: str) -> torch.Tensor:
        return local(self._moments[kind][name])

    def _gradient(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        return torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)

    def _flat(self, bucket: int) -> torch.Tensor:
        return torch.zeros_like(self._mean.worker_errors[bucket])

    def _first(self, bucket: int) -> int:
        """Return the number of the first tensor of a bucket among all names."""
        return sum(len(each.sizes) for each in self._buckets[:bucket])

    def _views(self, bucket: int, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter of a bucket with its part of a flat tensor, in the parameter's shape."""
        names = self._names[self._first(bucket) :]
        for name, (at, size) in zip(names, self._buckets[bucket].places(), strict=False):
            yield name, flat[at : at + size].view(local(self._parameters[name]).shape)

    def placed_state(self) -> dict[str, Value]:
        """See :class:`partool_runtime.optim.types.Optimizer`: the errors of compression.

        ``worker_error`` has the errors of all data-parallel ranks, one after the other; each of them also averages a
        part of the parameters, and has that part of ``server_error``.
        """
        state: dict[str, Value] = {f"lamb_ratio.{name}": ratio for name, ratio in self._ratios.items()}
        for bucket, errors in enumerate(self._mean.worker_errors):
            for name, error in self._views(bucket, errors):
                state[f"worker_error.{name}"] = Placed(error[None], self._by_rank(name, self._mean.ranks))
        for bucket, errors in enumerate(self._mean.server_errors):
            for part in self._mean.segments(self._buckets[bucket]):
                name = self._names[self._first(bucket) + part.tensor]
                mine = errors[part.at : part.at + part.size]
                state[f"server_error.{name}"] = FlatPlaced(mine, self._placement(name), part.within)
        return state

    def numbers(self) -> OptimizerNumbers:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        return {**super().numbers(), "variance_updates": self.variance_updates, "exchange_ranks": self._mean.ranks}

    def expect(self, numbers: OptimizerNumbers) -> dict[str, Value]:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        super().expect(numbers)
        self.variance_updates = numbers["variance_updates"]
        ranks = numbers["exchange_ranks"]
        if ranks == self._mean.ranks:
            return {}
        shapes = {name: (ranks, *local(self._parameters[name]).shape) for name in self._names}
        dtype = self._mean.worker_errors[0].dtype if self._names else torch.float32
        self._saved_errors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        return {
            f"worker_error.{name}": Placed(tensor, self._by_rank(name, ranks, mine=(0, ranks)))
            for name, tensor in self._saved_errors.items()
        }

    @torch.no_grad()
    def loaded(self) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`; errors of other numbers of ranks become their mean.

        Moves are averaged, so that ranks that all have the mean of the saved errors lose nothing of them.
        """
        super().loaded()
        for bucket, errors in enumerate(self._mean.worker_errors) if self._saved_errors else ():
            for name, error in self._views(bucket, errors):
                error.copy_(self._saved_errors.pop(name).mean(0))

    def _by_rank(self, name: str, ranks: int, mine: tuple[int, int] | None = None) -> Placement:
        """Return the place of the errors of ranks ``mine``, default this rank, among those of ``ranks`` ranks."""
        base = self._placement(name)
        mine = mine or (self._mean.rank, self._mean.rank + 1)
        return Placement((ranks, *base.shape), ((mine,), *base.spans), base.counts)

    def _placement(self, name: str) -> Placement:
        return self._placements.get(name) or full_placement(self._parameters[name].shape)

    def state_bytes(self) -> int:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        kept = [*self._mean.worker_errors, *self._mean.server_errors, *self._moves, *self._anchors.values()]
        return super().state_bytes() + local_bytes(kept)


def _factor(rule: StepRule) -> float:
    """Return the factor of the momentum in a move: the learning rate with the momentum's bias correction."""
    return rule.lr / (1.0 - rule.beta1**rule.step)
