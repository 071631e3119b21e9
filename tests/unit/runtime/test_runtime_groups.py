"""The process groups that a rank opens: as many as the planner counts, none twice, and none of one rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from _groups import open_groups
from hypothesis import given
from hypothesis import strategies as st
from often import named, often
from planned import FOLDER, plan_of

from partool.cost.codec import encode
from partool.cost.training.communicators import communicators
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.schedule import connected, generate, to_text
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS
from partool.work.training import TrainingWork
from partool_runtime.groups import Groups
from partool_runtime.mesh import build_ranks
from partool_runtime.parallel.pipeline.wires import MOST_BLOCKS, open_lines, rounds
from partool_runtime.preparation import prepare

SPEC = """\
model: {hidden: 32, layers: %d, heads: %d, kv_heads: %d, vocab: 256, ffn_hidden: 32, tied_embeddings: %s, %s}
hardware: {accelerator: h100-sxm, nodes: %d, per_node: 4}
data: python-stdlib
training: {global_batch: 32, sequence_length: 64, steps: 1}
parallel: {%s, compile: none}
"""
EXPERTS = "moe: {experts: 8, top_k: 2, ffn_hidden: 16, aux_loss: 0.01, bias_rate: 0.001}"
ALONE = "tensor: 1, sequence: 1, pipeline: 1"


class Case(NamedTuple):
    """A layout, by its ``parallel`` section, with the model that it needs."""

    parallel: str
    nodes: int = 1
    heads: int = 4
    kv_heads: int = 4
    tied: bool = False
    layers: int = 8
    more: str = "qkv_bias: false"

    def plan(self, folder: Path = FOLDER) -> Plan:
        """Return the plan; ``folder`` is where paths of the spec start."""
        tied = str(self.tied).lower()
        text = SPEC % (self.layers, self.heads, self.kv_heads, tied, self.more, self.nodes, self.parallel)
        return plan_of(text, folder=folder)


CASES = {
    "one axis of data": Case(f"data: {{zero: 3}}, {ALONE}"),
    "whole copies": Case(f"data: {{zero: 0}}, {ALONE}"),
    "hybrid shards": Case(f"data: {{zero: 3, shard: 4}}, {ALONE}", nodes=2),
    "tensor": Case("tensor: 4, sequence: 1, pipeline: 1"),
    "tensor and data": Case("tensor: 2, sequence: 1, pipeline: 1, data: {zero: 2}"),
    "key heads of several ranks": Case("tensor: 4, sequence: 1, pipeline: 1", kv_heads=2),
    "one key head": Case("tensor: 4, sequence: 1, pipeline: 1, data: {zero: 1}", kv_heads=1, nodes=2),
    "two dimensions": Case("tensor: {shape: [2, 2]}, sequence: 1, pipeline: 1, data: {zero: 1}", nodes=2),
    "rows and columns": Case(
        "tensor: {degree: 2, sequence_norms: true}, sequence: {degree: 2, method: dsp}, pipeline: 1",
        nodes=2,
        more="attention: {grid: [8, 8], layer_types: {pattern: [row, column]}}",
    ),
    "tied": Case("tensor: 1, sequence: 1, pipeline: {stages: 4, schedule: 1f1b}, data: {zero: 1}", tied=True),
    "two tied stages": Case("tensor: 2, sequence: 1, pipeline: 2, data: {zero: 1}", tied=True),
    "experts": Case(f"expert: 2, data: {{zero: 2}}, {ALONE}", more=EXPERTS),
    "experts of all": Case(f"expert: 8, data: {{zero: 1}}, {ALONE}", nodes=2, more=EXPERTS),
    "tokens once per node": Case(
        f"expert: 8, expert_exchange: node_first, data: {{zero: 1}}, {ALONE}", nodes=2, more=EXPERTS
    ),
    "experts in every widths": Case("tensor: 2, sequence: 1, pipeline: 1, data: {zero: 1}", nodes=2, more=EXPERTS),
    "experts of tensor ranks": Case(
        "expert: 4, tensor: 2, sequence: 1, pipeline: 2, data: {zero: 1}", nodes=4, more=EXPERTS
    ),
    "experts of tensor ranks only": Case(
        "expert: 2, tensor: 2, sequence: 1, pipeline: 1, data: {zero: 1}", nodes=2, more=EXPERTS
    ),
    "experts of sequence ranks": Case(
        "expert: 4, tensor: 2, sequence: 2, pipeline: 1, data: {zero: 3, shard: 2}", nodes=4, more=EXPERTS
    ),
    "all axes": Case(
        "tensor: 2, sequence: {degree: 2, method: ring}, pipeline: 2, data: {zero: 1}", nodes=4, kv_heads=2, tied=True
    ),
    **{
        f"schedule {name}": Case(
            f"tensor: {1 + (record.moves == 'activations')}, sequence: 1, pipeline: {{stages: 4, schedule: {name}}}",
            nodes=4,
        )
        for name, record in SCHEDULES.items()
    },
    **{
        f"sequence {name}": Case(f"tensor: 1, sequence: {{degree: 4, method: {name}}}, pipeline: 1", nodes=2)
        for name, record in METHODS.items()
        if not record.on_grids
    },
}  # fmt: skip


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """Be one rank of a world without other processes."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def opened(plan: Plan, rank: int) -> tuple[int, int, int]:
    """Return how many groups of several ranks a rank opens for collectives, for messages, and of two ranks."""
    with world(rank, plan.layout.mesh.world_size):
        ranks = replace(build_ranks(plan, torch.device("cpu")), groups=Groups(in_order=True))
        prepare(plan, ranks, lambda done, sent: None)
        groups = [group for group in open_groups() if dist.get_backend(group) == "fake"]
        assert all(group.size() > 1 for group in groups)
        wires = [group for group in groups if group.group_desc.partition(" ")[0] in ("pipeline", "weipipe")]
        assert all(group.size() == 2 for group in wires if group.group_desc.startswith("pipeline"))
        pairs = sum(group.size() == 2 for group in groups if group not in wires)
        return len(groups) - len(wires), len(wires), pairs


def counted(plan: Plan) -> tuple[int, int, int]:
    """Return how many groups of each kind the planner counts for the fullest rank."""
    lists = schedule_of(plan.layout) if plan.layout.pipeline.schedule == "file" else None
    job = TrainingWork(plan.model, plan.devices, 64, "bf16", global_batch=32, lists=lists)
    collective, wires, pairs = communicators(job, encode(plan.layout))
    return int(collective), int(wires), int(pairs)


def most(plan: Plan) -> tuple[int, int, int]:
    """Return the largest number of groups of each kind that a rank opens, and the pairs of the fullest rank."""
    ranks = [opened(plan, rank) for rank in range(plan.layout.mesh.world_size)]
    collective = max(groups for groups, _, _ in ranks)
    fewest = min(pairs for groups, _, pairs in ranks if groups == collective)
    return collective, max(wires for _, wires, _ in ranks), fewest


OFTEN = (
    "hybrid shards", "key heads of several ranks", "two dimensions", "two tied stages", "experts of tensor ranks only",
    "tokens once per node", "all axes", "schedule weipipe",
)  # fmt: skip
"""Layouts that run each time. "All axes" has tensor ranks with shards and a ring; the users' schedules have chunks."""


@pytest.mark.parametrize("case", named(CASES, OFTEN))
def test_planner_counts_the_groups_that_ranks_open(case: Case) -> None:
    plan = case.plan()
    assert counted(plan) == most(plan)


@pytest.mark.parametrize(
    ("name", "chunks"), often([("zb-v", 2), ("interleaved", 2), ("1f1b", 1)], [("zb-v", 2), ("interleaved", 2)])
)
def test_groups_of_a_schedule_of_the_users_own(name: str, chunks: int, tmp_path: Path) -> None:
    """Its placement says which ranks are neighbours, and whether the first and the last stage are on one rank."""
    (tmp_path / "own.csv").write_text(to_text(generate(name, 4, 8, chunks)))
    own = Case(
        "tensor: 1, sequence: 1, pipeline: {stages: 4, schedule: {file: own.csv}}, data: {zero: 1}", 2, tied=True
    )
    plan = own.plan(tmp_path)
    assert plan.layout.pipeline.schedule == "file"
    assert counted(plan) == most(plan)
    assert counted(plan)[0] == 2 + (name != "zb-v")


@given(st.lists(st.integers(0, 7), min_size=2, max_size=16))
def test_pairs_of_a_round_share_no_rank(placement: list[int]) -> None:
    pairs = connected(placement)
    found = rounds(pairs)
    assert sorted(pair for together in found for pair in together) == pairs
    for together in found:
        ranks = [rank for pair in together for rank in pair]
        assert len(set(ranks)) == len(ranks)
    degree = max((sum(rank in pair for pair in pairs) for rank in placement), default=0)
    assert len(found) <= max(2 * degree - 1, 0)


SPLIT = dist.split_group


class Splits:
    """Stands in for NCCL: records how groups are split off the world."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: pytest.fail("one call for every group"))
        monkeypatch.setattr(dist, "split_group", self._split)
        nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None)))
        monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)

    def _split(self, **kwargs: Any) -> object:
        inspect.signature(SPLIT).bind(**kwargs)
        self.calls.append(kwargs)
        mine = [part for part in kwargs["split_ranks"] if dist.get_rank() in part]
        return SimpleNamespace(ranks=mine[0]) if mine else None


@pytest.mark.parametrize("rank", often([0, 1, 13, 31], [13]))
def test_nccl_splits_the_world_once_for_all_groups_of_a_purpose(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks make the same calls; a rank gets the group that it is in; only wires have fewer channels."""
    plan = Case("tensor: 2, sequence: 1, pipeline: 4, data: {zero: 1, shard: 4}", nodes=8).plan()
    with world(rank, 32):
        splits = Splits(monkeypatch)
        ranks = replace(build_ranks(plan, torch.device("cpu")), groups=Groups(in_order=True))
        tensor, data = ranks.groups.of(ranks.tp.parts), ranks.groups.of(ranks.dp.parts)
        assert ranks.groups.of(ranks.shard.parts) is data, "the same ranks are one group"
        assert ranks.groups.of([range(32)]) is dist.group.WORLD
        assert ranks.groups.of([[each] for each in range(32)]) is None
        lines = open_lines(ranks.groups, ranks.pp.parts, timeout_s=7)
    assert (tensor.ranks, data.ranks) == (list(ranks.tp.mine), list(ranks.dp.mine))  # type: ignore[union-attr]
    collective, wires = splits.calls[:2], splits.calls[2:]
    assert [call["pg_options"] for call in collective] == [None, None]
    assert {call["pg_options"].config.max_ctas for call in wires} == {MOST_BLOCKS}
    assert {call["timeout"] for call in wires} == {timedelta(seconds=81)}
    assert len(wires) == 4, "two rounds each way, for all pipelines together"
    for call in splits.calls:
        members = [each for part in call["split_ranks"] for each in part]
        assert len(set(members)) == len(members)
        assert all(len(part) > 1 for part in call["split_ranks"])
    place = ranks.pp.place
    beside = [other for other in (place - 1, place + 1) if 0 <= other < 4]
    assert set(lines.groups) == {pair for other in beside for pair in ((place, other), (other, place))}
    for (a, b), group in lines.groups.items():
        assert group.ranks == sorted((lines.ranks[a], lines.ranks[b]))  # type: ignore[attr-defined]


def test_a_rank_without_a_pipeline_is_an_error() -> None:
    with world(5, 6), pytest.raises(ValueError, match="rank 5 is in none"):
        open_lines(Groups(), ((0, 1, 2, 3, 4),))


def test_groups_are_destroyed_in_the_reverse_order_of_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a group destroy it in one order, whatever torch calls it; the world is left to its owner."""
    with world(1, 6):
        groups = Groups()
        opened = [groups.of(parts, "a wire") for parts in (((0, 1),), ((1, 2),), ((0, 1, 2), (3, 4, 5)))]
        assert groups.of([range(6)]) is dist.group.WORLD
        assert groups.of(((3, 4),), "a wire") is None
        destroyed: list[object] = []
        destroy = dist.destroy_process_group
        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", lambda group: (destroyed.append(group), destroy(group)))
            groups.close()
        assert destroyed == opened[::-1]
        assert open_groups() == [dist.group.WORLD]
