"""Muon's steps: matrices are gathered on their owners, orthogonalised there, and scattered to the ranks' shards.

Momentum orthogonalised by Newton–Schulz: Jordan et al., kellerjordan.github.io/posts/muon; the scaling, and matrices
that data-parallel ranks share: Liu et al., arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from partool.layout.matrices import NEWTON_SCHULZ_STEPS, MatrixStack, matrix_stacks
from partool.plan.types import Plan
from partool.spec.training import NewtonSchulz
from partool_kernels.host import StepRule
from partool_runtime.mesh import Ranks
from partool_runtime.optim.owners import HeldBlock, Holders, Round, rounds
from partool_runtime.parallel.comm import UPDATES, counted_as

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵ (Jordan et al., kellerjordan.github.io/posts/muon), those of ``torch.optim.Muon``."""
_LEAST_NORM = 1e-7
"""Smallest norm by which a matrix is divided, that of ``torch.optim.Muon``."""
_RMS = 0.2
"""Root mean square of AdamW's updates, which Muon's are scaled to (Liu et al., arXiv 2502.16982, section 2.2)."""


def direction_type(working: torch.dtype, asked: NewtonSchulz) -> torch.dtype:
    """Return the type in which matrices are sent and orthogonalised; ``working`` is the type of master weights."""
    return torch.bfloat16 if asked == "bf16" else working


def orthogonalised(direction: torch.Tensor) -> torch.Tensor:
    """Return U S' Vᵀ for a matrix U S Vᵀ, where all of S' are near 1; the matrix may be overwritten.

    The operators, their order and their number are those of ``torch.optim.Muon``, so that bits are equal.
    """
    a, b, c = COEFFICIENTS
    tall = direction.size(0) > direction.size(1)
    x = direction.T if tall else direction
    x.div_(x.norm().clamp(min=_LEAST_NORM))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if tall else x


def scaled_rate(lr: float, rows: int, columns: int) -> float:
    """Return the learning rate that gives a matrix's update the root mean square of AdamW's, whatever its shape."""
    return lr * (_RMS * math.sqrt(max(rows, columns)))


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """A rank's shard of a parameter, of its gradient and of its momentum, and the rule of the step."""

    weight: torch.Tensor
    gradient: torch.Tensor
    momentum: torch.Tensor
    rule: StepRule


class WholeMatrices:
    """Makes Muon's steps of the parameters of this rank that are matrices; a step is a collective of the owners."""

    def __init__(
        self,
        stacks: Iterable[MatrixStack],
        newton_schulz: NewtonSchulz,
        holders: Holders | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``group`` has the ranks whose shards ``holders`` knows; None means that this rank holds all of a matrix."""
        self._stacks = {stack.name: stack for stack in stacks}
        self._asked, self._group = newton_schulz, group
        self._rounds: list[Round] = []
        if group is not None:
            assert holders is not None, "ranks that share matrices have to know each other's shards"
            self._rounds = rounds(list(self._stacks.values()), holders, group.rank())

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters."""
        return frozenset(self._stacks)

    def step(self, shards: Mapping[str, MatrixShard], like: torch.Tensor) -> None:
        """Update weights and momenta in place; gradients are scaled in place.

        ``shards`` has no empty shard, ``like`` the type and the device of all shards.
        """
        for shard in shards.values():
            if shard.rule.scale != 1.0:
                shard.gradient.mul_(shard.rule.scale)
            shard.momentum.lerp_(shard.gradient, 1.0 - shard.rule.beta1)
            shard.weight.mul_(1.0 - shard.rule.lr * shard.rule.weight_decay)
        if self._group is None:
            for name, shard in shards.items():
                self._alone(self._stacks[name], shard)
        else:
            like = torch.empty(0, dtype=direction_type(like.dtype, self._asked), device=like.device)
            self._together(shards, like, self._group)

    def _alone(self, stack: MatrixStack, shard: MatrixShard) -> None:
        for number in range(stack.count):
            rows = slice(number * stack.rows, (number + 1) * stack.rows)
            result = orthogonalised(self._direction(shard, (rows, slice(None))))
            shard.weight[rows].add_(result, alpha=-scaled_rate(shard.rule.lr, stack.rows, stack.columns))

    def _direction(self, shard: MatrixShard, block: tuple[slice, slice]) -> torch.Tensor:
        """Return Nesterov's direction of a block of a shard; it shares no memory with the shard."""
        direction = shard.gradient[block].lerp(shard.momentum[block], shard.rule.beta1)
        return direction.to(direction_type(shard.weight.dtype, self._asked))

    def _together(self, shards: Mapping[str, MatrixShard], like: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Gather the matrices of the next round and scatter those of the last one while one is orthogonalised."""
        incoming = self._gather(self._rounds[0], shards, like, group) if self._rounds else None
        leaving: _Exchange | None = None
        for number, gathered in enumerate(self._rounds):
            assert incoming is not None
            arrived = incoming
            after = self._rounds[number + 1 : number + 2]
            incoming = self._gather(after[0], shards, like, group) if after else None
            results = _orthogonalised(gathered, arrived.wait())
            if leaving is not None:
                self._take(self._rounds[number - 1], shards, leaving.wait())
                leaving = None  # frees its memory before the next one takes as much
            leaving = _exchange(results, _sizes(gathered.taken), like, group)
        if leaving is not None:
            self._take(self._rounds[-1], shards, leaving.wait())

    def _gather(
        self, one: Round, shards: Mapping[str, MatrixShard], like: torch.Tensor, group: dist.ProcessGroup
    ) -> _Exchange:
        sent = [[self._direction(shards[block.name], block.block.local) for block in to] for to in one.sent]
        return _exchange(sent, [sum(each.elements for each in of) for of in one.received], like, group)

    def _take(self, one: Round, shards: Mapping[str, MatrixShard], results: Sequence[torch.Tensor]) -> None:
        """Update this rank's shards by the results of a round."""
        for taken, result in zip(one.taken, results, strict=True):
            at = 0
            for name, block in taken:
                shard, stack = shards[name], self._stacks[name]
                weight = shard.weight[block.local]
                part = result[at : at + block.elements].view(weight.shape)
                weight.add_(part, alpha=-scaled_rate(shard.rule.lr, stack.rows, stack.columns))
                at += block.elements


def open_matrices(plan: Plan, names: Iterable[str], ranks: Ranks) -> WholeMatrices:
    """Return the steps of this rank's trained parameters ``names`` that are matrices; a collective of all ranks."""
    names = set(names)
    stacks = [stack for stack in matrix_stacks(plan.model) if stack.name in names]
    holders = Holders(plan, [stack.name for stack in stacks])
    parts = [tuple(range(at, at + holders.size)) for at in range(0, ranks.world_size, holders.size)]
    return WholeMatrices(stacks, plan.optimizer.newton_schulz, holders, ranks.groups.of(parts))


def _orthogonalised(one: Round, received: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return, by place of a rank, the blocks of this rank's result that the rank holds."""
    if one.mine is None:
        return [[] for _ in one.returned]
    stack = one.mine.stack
    matrix = received[0].new_empty(stack.rows, stack.columns)
    for blocks, values in zip(one.received, received, strict=True):
        at = 0
        for block in blocks:
            part = matrix[block.inside]
            part.copy_(values[at : at + block.elements].view(part.shape))
            at += block.elements
    result = orthogonalised(matrix).contiguous()  # so that blocks for several ranks are not copied one by one
    return [[result[block.inside] for block in blocks] for blocks in one.returned]


@dataclass(frozen=True, slots=True)
class _Exchange:
    """An all-to-all in flight."""

    work: dist.Work | None
    received: torch.Tensor
    sizes: list[int]
    sent: torch.Tensor
    """Kept until the exchange has ended."""

    def wait(self) -> Sequence[torch.Tensor]:
        """Wait for the end; return what each rank has sent, as flat tensors."""
        if self.work is not None:
            self.work.wait()
        return torch.split(self.received, self.sizes)


def _exchange(
    sent: Sequence[Sequence[torch.Tensor]], sizes: list[int], like: torch.Tensor, group: dist.ProcessGroup
) -> _Exchange:
    """Start to send each rank a list of blocks; ``sizes`` are the elements that each rank sends here."""
    splits = [sum(block.numel() for block in blocks) for blocks in sent]
    flat = [block.reshape(-1) for blocks in sent for block in blocks]
    payload = torch.cat(flat) if flat else like.new_empty(0)
    received = like.new_empty(sum(sizes))
    with counted_as(purpose=UPDATES):
        work = dist.all_to_all_single(received, payload, sizes, splits, group=group, async_op=True)
    return _Exchange(work, received, sizes, payload)


def _sizes(blocks: Sequence[Sequence[HeldBlock]]) -> list[int]:
    return [sum(block.block.elements for block in of) for of in blocks]
