"""Ranks of test_pipeline_engine.py."""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from _pipeline_parts import BOUNDARY, Alive, B, H, Part, S, close, make_part, micro_batches, reference, weight
from _ranks import joined

from partool.schedule import (
    COMPUTE,
    Action,
    Schedule,
    after,
    check,
    generate,
    in_flight,
    peer,
    remap,
    validate,
    without_backward,
)
from partool.strategies.schedules import SCHEDULES
from partool_runtime.data.batches import MicroBatch
from partool_runtime.groups import Groups
from partool_runtime.parallel.pipeline.engine import PipelineEngine
from partool_runtime.parallel.pipeline.types import Done
from partool_runtime.parallel.pipeline.wires import UNFINISHED_SENDS, Lines, TransferError, Wires, open_lines


def schedules(ranks: int) -> list[Schedule]:
    found = []
    for name, generator in SCHEDULES.items():
        for chunks in (1, 2, 4):
            for count in (ranks, 2 * ranks, 2 * ranks + 1 - ranks % 2):
                if generator.moves == "activations" and check(name, ranks, count, chunks) is None:
                    found.append(generate(name, ranks, count, chunks))
    return found


def scrambled(ranks: int) -> Schedule:
    """Return a list as a user may write one: sends late, receives early, some backward passes in two halves."""
    chosen = random.Random(ranks)
    found = generate("interleaved", ranks, 2 * ranks, 2)
    lists = [
        [
            half
            for action in actions
            for half in (
                (action._replace(kind="I"), action._replace(kind="W"))
                if action.kind == "B" and (action.stage + action.micro_batch) % 3 == 0
                else (action,)
            )
        ]
        for actions in found.lists
    ]
    for _ in range(30):
        changed = [list(actions) for actions in lists]
        for _ in range(2 * ranks):
            actions = chosen.choice(changed)
            place = chosen.randrange(len(actions))
            actions.insert(place + chosen.randint(-3, 3), actions.pop(place))
        if not validate(replace(found, lists=tuple(map(tuple, changed)))):
            lists = changed
    return replace(found, name="file", lists=tuple(map(tuple, lists)))


class Spy:
    """A sync that takes note of its calls, and holds that a first half leaves the weights of matrices alone."""

    def __init__(self, mine: dict[int, Part]) -> None:
        self.mine = mine
        self.moved = False
        """Stages have moved, and with them second halves that were done before."""
        self.calls: list[tuple[str, Action]] = []
        self.finished: list[tuple[str, Action]] = []
        self.grads: dict[int, list[torch.Tensor | None]] = {}

    def matrices(self, stage: int) -> list[torch.Tensor | None]:
        linears = [module for module in self.mine[stage].modules() if isinstance(module, torch.nn.Linear)]
        return [None if linear.weight.grad is None else linear.weight.grad.clone() for linear in linears]

    def before(self, action: Action) -> None:
        self.calls.append(("before", action))
        if action.kind in ("B", "I") and action.stage + 1 not in self.mine and not self.moved:
            alive = [output for output in self.mine[action.stage].outputs if not output.expired()]
            assert len(alive) <= UNFINISHED_SENDS, action
        self.grads[action.stage] = self.matrices(action.stage)

    def after(self, action: Action) -> None:
        self.calls.append(("after", action))
        then, now = self.grads[action.stage], self.matrices(action.stage)
        for one, two in zip(then, now, strict=True):
            same = one is two is None or (one is not None and two is not None and torch.equal(one, two))
            unlabelled = not (micro_batches(action.micro_batch + 1)[-1].labels_BS >= 0).any()
            assert same == (action.kind in ("F", "I") or unlabelled) or one is None or self.moved, action

    def finish(self) -> None:
        self.finished, self.calls = self.calls, []


class Case:
    """One schedule on one pipeline of the world."""

    def __init__(self, schedule: Schedule, rank: int, lines: Lines) -> None:
        self.schedule, self.rank = schedule, rank
        self.what = f"{schedule.name} P={schedule.ranks} M={schedule.micro_batches} chunks={schedule.chunks}"
        self.micro = micro_batches(schedule.micro_batches)
        self.weight = weight(len(self.micro))
        self.mine: dict[int, Part] = {stage: make_part(schedule.stages, stage) for stage in schedule.on_rank(rank)}
        self.wires = Wires(rank, lines, BOUNDARY, timeout_s=60)
        self.spy = Spy(self.mine)
        self.engine = PipelineEngine(schedule, self.mine, self.wires, sync=self.spy)
        self.loss, self.gradients = reference(schedule.stages, len(self.micro))

    def step(self) -> torch.Tensor:
        self.clear()
        return self.engine.step(self.micro, self.weight)

    def clear(self) -> None:
        for part in self.mine.values():
            part.zero_grad()

    def compare(self, loss: torch.Tensor, trained_from: int = 0) -> None:
        assert (loss.dtype, loss.shape) == (torch.float64, ())
        if self.schedule.stages - 1 in self.mine:
            close(loss, self.loss, self.what)
        else:
            assert float(loss) == 0.0
        self.compare_gradients(trained_from)

    def compare_gradients(self, trained_from: int = 0) -> None:
        for stage, part in self.mine.items():
            for name, parameter in part.named_parameters():
                what = f"{self.what} stage {stage} {name}"
                if stage < trained_from:
                    assert parameter.grad is None, what
                else:
                    close(parameter.grad, self.gradients[stage][name], what)


def whole_steps(case: Case) -> None:
    """A step, an evaluation of another number of micro-batches, and a step whose actions are told.

    Every action is told once, in an order in which nothing comes before what it needs.
    """
    case.compare(case.step())
    seen = case.engine.evaluate(micro_batches(3))
    if case.schedule.stages - 1 in case.mine:
        close(seen, reference(case.schedule.stages, 3)[0], case.what)
    told: list[Done] = []
    case.engine.watch = told.append
    case.compare(case.step())
    case.engine.watch = None
    own = case.schedule.lists[case.rank]
    assert case.spy.finished == [(when, a) for a in own if a.kind in COMPUTE for when in ("before", "after")]
    assert sorted(done.action for done in told) == sorted(own), case.what
    assert [d.action for d in told if d.action.kind in COMPUTE] == [a for a in own if a.kind in COMPUTE]
    assert all(done.start_s <= done.stop_s for done in told)
    compute = [done for done in told if done.action.kind in COMPUTE]
    for one, two in itertools.pairwise(compute):
        assert one.stop_s <= two.start_s - two.waited_s + 1e-9, case.what


def traffic(case: Case, lines: Lines) -> None:
    """Messages and bytes against their formulas, and the activations held against the simulator's."""
    schedule = case.schedule
    graphs = Alive.count
    Alive.most = 0
    sent, sent_bytes = case.wires.sent_messages, case.wires.sent_bytes
    for stage in case.mine.values():
        stage.outputs.clear()
    case.compare(case.step())
    # What was sent is not held until the step's end; on one rank it is the next stage's input.
    assert all(output.expired() for stage in case.mine.values() for output in stage.outputs), case.what
    total = torch.tensor([case.wires.sent_messages - sent, case.wires.sent_bytes - sent_bytes])
    dist.all_reduce(total, group=lines.groups[0, 1])
    ranks, count, chunks = schedule.ranks, schedule.micro_batches, schedule.chunks
    waves = schedule.name in ("hanayo", "zb-v")
    # Hanayo with W = chunks / 2 waves: 4 M W (P - 1). Else each of the boundaries between stages is crossed twice.
    messages = 2 * count * chunks * (ranks - 1) if waves else 2 * count * (ranks * chunks - 1)
    assert total.tolist() == [messages, messages * B * S * H * 8], case.what
    expected = in_flight(schedule.name, ranks, count, chunks)[case.rank]
    assert case.engine.peak_live == expected, case.what
    assert Alive.count == graphs, case.what
    if not SCHEDULES[schedule.name].split:
        assert Alive.most == graphs + expected, f"{case.what}: {Alive.most} graphs, not {expected}"


def frozen(case: Case, lines: Lines) -> None:
    """The first stages, or all but the last, or all are not trained."""
    stages = case.schedule.stages
    trained_from = random.Random(case.what).choice([1, stages - 1, stages])
    less = Case(without_backward(case.schedule, trained_from), case.rank, lines)
    for stage, part in less.mine.items():
        part.requires_grad_(stage >= trained_from)
    less.compare(less.step(), trained_from)
    # The first trained stage computes no gradient that nobody wants.
    wants = {stage: part.input_wants_gradient for stage, part in less.mine.items()}
    assert wants == {stage: stage > trained_from for stage in less.mine}, less.what


def stopped(case: Case, lines: Lines) -> None:
    """Stop at any action, go on with another map of stages, stop again, and do a whole step on the last map."""
    chosen = random.Random(case.what)
    schedule = left = case.schedule
    run = Case(schedule, case.rank, lines)
    run.clear()
    run.engine.start(run.micro, run.weight)
    for share in (chosen.random(), chosen.random()):
        done = after(left, int(share * sum(map(len, left.lists))))
        run.engine.run(done)
        placement = [chosen.randrange(schedule.ranks) for _ in range(schedule.stages)]
        move(run, placement)
        left = remap(remap(left, done, left.placement), [0] * schedule.ranks, placement)
    run.engine.run()
    loss = run.engine.finish()
    dist.all_reduce(loss, group=lines.groups[0, 1])
    close(loss, run.loss, f"{run.what} stopped")
    run.compare_gradients()
    run.compare(run.step())


def move(run: Case, placement: Sequence[int]) -> None:
    """Put stages on other ranks; where one arrives, there is one without any of its values."""
    before, run.mine = run.mine, {}
    for stage in (stage for stage, rank in enumerate(placement) if rank == run.rank):
        run.mine[stage] = before.get(stage) or make_part(run.schedule.stages, stage)
        if stage not in before:
            for parameter in run.mine[stage].parameters():
                torch.nn.init.constant_(parameter, torch.nan)
    run.spy.moved, run.spy.mine = True, run.mine
    run.engine.move(placement, run.mine)


@functools.cache
def lines_of(ranks: int) -> Lines:
    """Return pipelines of so many ranks; the remaining ranks of the world are a pipeline of their own."""
    joined()
    world = dist.get_world_size()
    return open_lines(
        Groups(), tuple(tuple(range(first, min(first + ranks, world))) for first in range(0, world, ranks))
    )


def parity(ranks: int) -> None:
    """Run all schedules of so many pipeline ranks."""
    lines = lines_of(ranks)
    rank = lines.ranks.index(dist.get_rank())
    for schedule in schedules(len(lines.ranks)):
        case = Case(schedule, rank, lines)
        whole_steps(case)
        if schedule.ranks > 1:
            traffic(case, lines)
            if schedule.micro_batches == schedule.ranks:
                stopped(case, lines)
            if schedule.micro_batches == 2 * schedule.ranks:
                frozen(case, lines)
    own = scrambled(len(lines.ranks))
    whole_steps(Case(own, rank, lines))


class Faulty(Part):
    """A stage that hangs, or whose process ends, in one micro-batch's forward pass."""

    fault: str = ""

    def forward(self, x_BSH: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        if micro is micro_batches(4)[2] and self.fault == "hang":
            time.sleep(4.0)
        if micro is micro_batches(4)[2] and self.fault == "die":
            os._exit(0)
        return super().forward(x_BSH, micro)


def fault(kind: str, timeout_s: float = 1.5) -> None:
    """Rank 1 hangs or dies: the others say where they stand, within the timeout."""
    rank = joined()
    ranks = dist.get_world_size()
    schedule = generate("1f1b", ranks, 4)
    wires = Wires(rank, open_lines(Groups(), (tuple(range(ranks)),)), BOUNDARY, timeout_s=timeout_s)
    part = Faulty(1, first=rank == 0, last=rank == ranks - 1).double()
    part.fault = kind if rank == 1 else ""
    engine = PipelineEngine(schedule, {rank: part}, wires)
    started_s = time.monotonic()
    with pytest.raises(TransferError) as error:
        engine.step(micro_batches(4), weight(4))
    took_s = time.monotonic() - started_s
    told(schedule, error.value, kind, rank)
    assert took_s < (4 * timeout_s if rank == 1 else 3 * timeout_s), f"{kind}: {took_s} s"


def told(schedule: Schedule, error: TransferError, fault: str, rank: int) -> None:
    kind, stage, batch = error.action
    assert error.rank == rank
    assert error.action in schedule.lists[rank]
    assert error.peer == peer(schedule, rank, error.action)[0]
    for words in (f"pipeline rank {rank}", f"{stage}{kind}{batch}", f"micro-batch {batch}", f"rank {error.peer}"):
        assert words in str(error), str(error)
    if rank == 0:
        assert error.action == Action("RECV_B", 0, 1) or fault == "die", str(error)
    if rank == 2:
        assert error.action == Action("RECV_F", 2, 2), str(error)
    if rank != 1:
        assert ("within" in str(error) or "moved" in str(error)) == (fault == "hang"), str(error)
