"""Enumerates a space: meshes first, then the choices within each mesh that no constraint rules out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import RING, Layouts
from partool.planner.forms.experts import Form, exchange_of, experts_on_tensor_ranks
from partool.planner.forms.experts import forms as expert_forms
from partool.planner.forms.experts import shared as can_share
from partool.planner.forms.runnable import able, nothing_runs, within
from partool.planner.forms.tensor_forms import TensorForm, busy, divides, forms, overlap_of, pieces_of
from partool.planner.forms.tiles import sizes as tile_sizes
from partool.planner.problem import Problem, divisors
from partool.planner.rules.tensor_cuts import cuttable
from partool.planner.search.policies import Policies, policies_of
from partool.planner.search.schedules import Scheduled, schedules
from partool.planner.search.sequence_forms import Forms, best_forms, every_form
from partool.planner.search.space import GROUP_COLUMNS, Space, wide

MOST_STAGES = 128
"""Maximum number of pipeline ranks tried: twice as many as in published runs (arXiv 2104.04473: 64 for 1T
parameters)."""
TOKENS_PER_RANK = 256
"""Minimum number of a sequence's tokens per rank under sequence parallelism; with fewer, kernels are inefficient."""
MANY = 300_000
"""Number of groups above which only powers of two are tried for degrees that the spec leaves ``auto``."""
_AT_ONCE = 65536
"""Number of groups whose columns are computed at once."""
_UNCUT = "no sequence method cuts the model so"
_BEATEN = "another sequence method takes less time and no more memory"


def build(problem: Problem, takes: Callable[[int], bool] = lambda _: True) -> Space:
    """Enumerate a problem's layouts; constraints on whole meshes are applied first.

    ``takes`` says of a number of data-parallel ranks whether meshes with it are enumerated.
    """
    policies = policies_of(problem)
    builder = _Builder(problem, policies, takes)
    columns = builder.columns(MANY)
    if columns is None:
        builder = _Builder(problem, policies, takes, coarse=True)
        columns = builder.columns()
    assert columns is not None
    return builder.space(columns)


def rebuilt(problem: Problem, space: Space) -> Space:
    """Return the groups and policies of a problem that is that of ``space`` with relaxed constraints.

    Numbers of layouts before pruning are those of ``space``. Tiles rule out schedules that move weights; what tiles of
    networks rule out beside these is enumerated anew.
    """
    policies, groups = policies_of(problem), space.groups
    if problem.mlp_tile or len(policies) != len(space.policies):
        return build(problem)
    builder = _Builder(problem, policies, lambda _: True)
    builder.enumerated, builder.pruned = space.enumerated, dict(space.pruned)
    moves = np.asarray(groups.ring)
    return builder.space_of(groups.take(~moves) if problem.loss_tile and moves.any() else groups)


def micro_batches(problem: Problem, dp: int) -> list[int]:
    """Return the micro-batch sizes to try: the spec's, or small and power-of-two divisors of a rank's batch."""
    batch, pinned = problem.spec.training.global_batch, problem.spec.parallel.micro_batch
    if batch % dp:
        return []
    share = batch // dp
    if pinned != "auto":
        return [pinned] if share % pinned == 0 else []
    return [n for n in divisors(share) if n <= 16 or _power(n) or n == share]


def _power(n: int) -> bool:
    return n & (n - 1) == 0


class _Builder:
    """Builder of a space: enumerates meshes, then the choices within each mesh that no constraint rules out."""

    def __init__(
        self, problem: Problem, policies: Policies, takes: Callable[[int], bool], *, coarse: bool = False
    ) -> None:
        self.problem = problem
        self.takes = takes
        self.policies = policies
        self.coarse = coarse
        self.pruned: dict[str, int] = {}
        self.enumerated = 0
        self._with_parameters = len(policies)
        self._without = int((policies.parameters == 0).sum())

    def columns(self, most: float = float("inf")) -> NDArray[np.int32] | None:
        """Return the groups as a matrix with one row for each name in :data:`GROUP_COLUMNS`; None if over ``most``."""
        blocks, groups = [], 0
        for block in (block for mesh in self._meshes() for block in self._below(*mesh)):
            blocks.append(block.astype(np.int32))
            groups += block.shape[1]
            if groups > most:
                return None
        return np.concatenate(blocks, axis=1) if blocks else np.zeros((len(GROUP_COLUMNS), 0), dtype=np.int32)

    def space(self, columns: NDArray[np.int32]) -> Space:
        """Return the space of the groups in ``columns``, with the choices that follow from these columns."""
        columns, compiled = self._compiled(columns)
        return self.space_of(Layouts(**dict(zip(GROUP_COLUMNS, columns, strict=True)), compiled=compiled))

    def _able(self, groups: Layouts) -> NDArray[np.bool_]:
        """Return a mask of the groups that the runtime can run."""
        averages = self.problem.spec.training.ema is not None
        return able(groups, self.problem.model, hf=self.problem.described is not None, averages=averages)

    def space_of(self, groups: Layouts) -> Space:
        """Return the space of groups that have all columns but those that follow from the others."""
        size = np.size(groups.pp)
        groups = groups.with_columns(**self._following(groups, size))
        kept = within(self.problem.engine, groups)
        if not kept.all():
            self._count_out(f"{self.problem.engine.title} cannot", np.asarray(groups.zero)[~kept])
            return self.space_of(groups.take(kept))
        some = not nothing_runs(self.problem)
        return Space(
            groups=groups,
            size=size,
            policies=self.policies,
            runnable=self._able(groups) & some,
            runnable_policies=able(self.policies.rows) & some,
            enumerated=self.enumerated,
            pruned=dict(self.pruned),
            layers=self.problem.model.blocks,
            offloads_from=self.problem.engine.offloads_from,
        )

    def _following(self, groups: Layouts, size: int) -> dict[str, NDArray[Any]]:
        """Return the columns of groups that follow from the others: tiles, exchanges, overlap of tensor ranks."""
        names = ("tensor_overlap", "tensor_chunks", "mlp_tile_tokens", "loss_tile_tokens", "expert_exchange")
        columns: dict[str, NDArray[Any]] = {name: np.zeros(size, dtype=np.int32) for name in names}
        for start in range(0, size, _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            rows = wide(groups.take(part))
            networks, losses = tile_sizes(self.problem, rows)
            tensor = overlap_of(self.problem, rows), pieces_of(self.problem, rows)
            values = (*tensor, networks, losses, exchange_of(self.problem, rows))
            for name, value in zip(names, values, strict=True):
                columns[name][part] = value
        return columns

    def _compiled(self, columns: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """Return the groups, some of them twice, and which of them have compiled blocks.

        Compiled blocks keep the gathered inputs of products of tensor ranks that share norms, almost as many bytes as
        all else that a layer saves. Blocks that are not compiled gather them again, so both are tried.
        """
        named = dict(zip(GROUP_COLUMNS, columns, strict=True))
        compiled = np.full(columns.shape[1], int(self.problem.compile == "block"), dtype=np.int32)
        compiled[(named["pp"] > 1) & self.problem.excludes_compile(named["schedule"])] = 0
        twice = (compiled == 1) & (named["tp"] > 1) & (named["sequence_norms"] == 1)
        if not self.problem.compiles_later or self.problem.engine.name != "partool" or not twice.any():
            return columns, compiled
        zero = named["zero"][twice]
        third = int((zero == 3).sum())
        self.enumerated += third * self._with_parameters + (len(zero) - third) * self._without
        return np.concatenate([columns, columns[:, twice]], axis=1), np.concatenate([compiled, 0 * compiled[twice]])

    def _axis(self, pinned: Any, limit: int) -> list[int]:
        if pinned != "auto":
            return [pinned]
        values = [n for n in divisors(self.problem.world_size) if n <= limit]
        return [n for n in values if _power(n)] if self.coarse else values

    @cached_property
    def _tensor_axis(self) -> list[int]:
        return self._axis(self.problem.tensor_degree, self.problem.model.heads)

    @cached_property
    def _sequence_axis(self) -> list[int]:
        asked = self.problem.spec.parallel.sequence
        if self.problem.one_bit and asked.degree == "auto":
            return [1]
        degrees = self._axis(asked.degree, self.problem.spec.training.sequence_length)
        # A spec that pins a sequence method gets sequence parallelism, even if it is slower.
        several = [ranks for ranks in degrees if ranks > 1] if asked.method != "auto" else []
        return several or degrees

    @cached_property
    def _divided(self) -> bool:
        """True if a tensor-parallel degree to try divides the model evenly; uneven degrees are then skipped."""
        problem = self.problem
        return any(tp > 1 and divides(problem.model, tp) and cuttable(problem, tp) for tp in self._tensor_axis)

    def _meshes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the degrees of meshes that no constraint rules out, as (tensor, pipeline, sequence, data)."""
        model, world = self.problem.model, self.problem.world_size
        for tp in self._tensor_axis:
            for pp in self._axis(self.problem.pinned_degrees.get("pipeline.stages", "auto"), model.blocks):
                if world % (tp * pp):
                    continue
                for cp in self._sequence_axis:
                    if world % (tp * pp * cp):
                        continue
                    dp = world // (tp * pp * cp)
                    if not self.takes(dp):
                        continue
                    weight = self._weight(pp, cp, dp)
                    self.enumerated += weight
                    reason = self._reason(tp, pp, cp, dp)
                    if reason is None:
                        yield tp, pp, cp, dp
                    else:
                        self._prune(reason, weight)

    def _reason(self, tp: int, pp: int, cp: int, dp: int) -> str | None:
        """Return text on the first constraint that a mesh breaks; None if it breaks no constraint."""
        problem, model = self.problem, self.problem.model
        parallel, training = problem.spec.parallel, problem.spec.training
        open_tensor = problem.tensor_degree == "auto"
        uneven = open_tensor and not divides(model, tp)
        rules = (
            (uneven and self._divided, "heads or widths do not divide by tensor, those of other degrees do"),
            (uneven and not busy(model, tp), "tensor ranks without heads or widths of their own"),
            (open_tensor and tp > 1 and problem.domain % tp != 0, "tensor parallelism across the fast link's domain"),
            (pp > model.blocks, "more stages than layers"),
            (parallel.pipeline.stages == "auto" and pp > MOST_STAGES, f"more than {MOST_STAGES} pipeline stages"),
            (training.sequence_length < cp, "more sequence ranks than tokens"),
            (
                cp > 1 and parallel.sequence.degree == "auto" and training.sequence_length // cp < TOKENS_PER_RANK,
                f"fewer than {TOKENS_PER_RANK} tokens of a sequence per rank",
            ),
            (training.global_batch % dp != 0, "global_batch does not divide by the data-parallel ranks"),
            (self._least % (tp * pp * cp) != 0, "min_nodes: fewer nodes could not hold as many model-parallel ranks"),
        )
        broken_rule = next((reason for broken, reason in rules if broken), None)
        if broken_rule is None and open_tensor and not cuttable(problem, tp):
            # Checked last, as it is slow for large models.
            return "modules that so many tensor ranks cannot share"
        return broken_rule

    @cached_property
    def _least(self) -> int:
        """Number of ranks on ``launch.min_nodes`` nodes; 0 if the degrees in the spec do not divide this number.

        As every degree divides 0, the number 0 rules out no mesh.
        """
        problem = self.problem
        ranks = (problem.spec.launch.min_nodes or 0) * problem.devices.per_node
        return 0 if ranks % prod(problem.pinned_degrees.values()) else ranks

    def _weight(self, pp: int, cp: int, dp: int) -> int:
        """Return the number of layouts that a mesh has before constraints rule out any of them."""
        batches = max(1, len(micro_batches(self.problem, dp)))
        tp = self.problem.world_size // (pp * cp * dp)
        sharing = sum(
            self._with_parameters if zero == 3 else self._without
            for zero, _ in self._sharing(dp, cp, tp)
        )  # fmt: skip
        shapes = max(1, len(self._forms(tp, cp)))
        experts, schedules = len(self._experts(tp, dp * cp * tp)), len(self._schedules(pp))
        return max(1, len(self._every_form[cp, tp])) * batches * sharing * schedules * experts * shapes

    @cached_property
    def _forms(self) -> Callable[[int, int], tuple[TensorForm, ...]]:
        return cache(partial(forms, self.problem))

    @cached_property
    def _every_form(self) -> Forms:
        """All forms of sequence parallelism, by sequence and tensor degree."""
        world = self.problem.world_size
        meshes = [(cp, tp) for cp in self._sequence_axis for tp in self._tensor_axis if world % (cp * tp) == 0]
        return every_form(self.problem, meshes)

    @cached_property
    def _best_forms(self) -> Forms:
        """Forms of sequence parallelism that no other form replaces, by sequence and tensor degree."""
        return best_forms(self.problem, self._every_form)

    def _sharing(self, dp: int, cp: int, tp: int) -> list[tuple[int, int]]:
        """Return the pairs (ZeRO stage, number of data-parallel ranks that share the state) to try.

        Sequence-parallel ranks hold the same parameters, so the state is sharded over them too.
        """
        data, inside = self.problem.spec.parallel.data, max(1, self.problem.domain // (cp * tp))
        # Parameters are offloaded as ZeRO-3 shards, even on a single rank.
        to_host = self.problem.spec.parallel.offload.parameters in ("cpu", "nvme")
        zeros = (
            (data.zero,) if data.zero != "auto" else (3,) if to_host else (0,) if self.problem.one_bit else (0, 1, 2, 3)
        )
        # ZeRO-3 helps even a single rank: compute-precision copies exist for one layer at a time.
        alone = self.problem.world_size == 1 and self.problem.host_link
        pairs = []
        for zero in zeros:
            if zero == 0 or dp * cp == 1:
                least = zero in (0, 3 * alone) or (zero == 1 and experts_on_tensor_ranks(self.problem, tp))
                if data.zero != "auto" or to_host or (least and data.shard in ("auto", 1)):
                    pairs.append((zero, 1))
            elif data.shard != "auto":
                pairs += [(zero, data.shard)] if dp % data.shard == 0 else []
            else:
                pairs.append((zero, dp))
                if 1 < inside * cp <= self.problem.domain and inside < dp and dp % inside == 0:
                    pairs.append((zero, inside))
        return pairs

    @cached_property
    def _schedules(self) -> Callable[[int], tuple[Scheduled, ...]]:
        return cache(partial(schedules, self.problem))

    def _experts(self, tp: int, ranks: int) -> list[Form]:
        """Return the forms of expert parallelism to try; the ranks of each divide ``ranks``, the ranks of a stage."""
        forms = expert_forms(self.problem, tp, ranks)
        pinned = self.problem.spec.parallel.expert != "auto"
        return [form for form in forms if pinned or all(map(_power, form))] if self.coarse else forms

    def _below(self, tp: int, pp: int, cp: int, dp: int) -> Iterator[Any]:
        """Yield the groups of one mesh as a matrix with one row for each name in :data:`GROUP_COLUMNS`."""
        sequences, experts = self._best_forms[cp, tp], self._experts(tp, dp * cp * tp)
        sharing, data_zero = self._sharing(dp, cp, tp), self.problem.spec.parallel.data.zero
        schedules, batches = self._schedules(pp), micro_batches(self.problem, dp)
        lists = (sequences, experts, sharing, schedules, batches, self._forms(tp, cp))
        if not all(lists):
            why = (_UNCUT, "experts do not divide over the ranks",
                   "shard does not divide the data-parallel ranks", "no schedule has room for the chunks",
                   "micro_batch does not divide a rank's share", "tensor.shape is of another degree")  # fmt: skip
            reason = next(text for text, values in zip(why, lists, strict=True) if not values)
            self._prune(reason, self._weight(pp, cp, dp))
            return
        every = len(self._every_form[cp, tp])
        self._prune(_BEATEN, self._weight(pp, cp, dp) // every * (every - len(sequences)))
        index = np.indices([len(values) for values in lists]).reshape(len(lists), -1)
        share = self.problem.spec.training.global_batch // dp
        zero, shards = np.array(sharing).T[:, index[2]]
        degrees = np.prod(np.array(experts), axis=1)[index[1]]
        moving = np.isin([one[0] for one in schedules], RING)[index[3]]
        # Interleaved schedules run micro-batches in groups of as many as ranks (arXiv 2104.04473, section 2.2).
        takes = np.array([[one.takes(pp, share // n) for n in batches] for one in schedules])
        accepted = takes[index[3], index[4]]
        # Schedules that move weights exclude ZeRO, tensor and sequence parallelism.
        accepted &= ((zero == 0) & (tp == 1) & (cp == 1)) | ~moving | (pp == 1)
        # Without ranks that share anything, stage 1 is stage 0 by another name.
        accepted &= (data_zero != "auto") | (zero != 1) | (shards * cp > 1) | (degrees > 1)
        fits = can_share(shards * cp * tp, zero, degrees)
        self._count_out("experts do not divide over the ranks of a copy of the state", zero[~fits])
        self._count_out(
            "the schedule does not take so many micro-batches, or that ZeRO stage, or tensor or sequence parallelism",
            zero[fits & ~accepted],
        )
        yield self._block((tp, pp, cp, dp), lists, index[:, accepted & fits])

    def _block(self, mesh: tuple[int, int, int, int], lists: tuple[Any, ...], index: NDArray[np.intp]) -> Any:
        """Return the groups of a mesh (tensor, pipeline, sequence, data) whose choices are at ``index`` in the lists.

        The lists are those of :meth:`_below`: forms of sequences and of experts, pairs of ZeRO stage and shards,
        schedules, micro-batches, shapes.
        """
        tp, pp, cp, dp = mesh
        sequence, experts, (zero, shards), scheduled, micro, shape = (
            np.array([one[:3] for one in values] if at == 3 else values).T[..., index[at]]
            for at, values in enumerate(lists)
        )
        same, share = np.ones_like(micro), self.problem.spec.training.global_batch // dp
        return np.stack(
            [
                pp * same, dp // shards, shards, cp * same, tp * same, *experts, zero, micro, share // micro,
                *scheduled, *sequence, *shape,
            ]
        )  # fmt: skip

    def _count_out(self, reason: str, zero: NDArray[Any]) -> None:
        """Count the layouts of groups that are ruled out, given the ZeRO stage of each of them."""
        third = int((zero == 3).sum())
        self._prune(reason, third * self._with_parameters + (len(zero) - third) * self._without)

    def _prune(self, reason: str, count: int) -> None:
        if count:
            self.pruned[reason] = self.pruned.get(reason, 0) + count
