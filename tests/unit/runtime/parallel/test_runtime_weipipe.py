"""Parts of WeiPipe's executor: flat weights, programs, lanes; unsupported settings are refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from partool.schedule import Action, generate
from partool.schedule.weipipe import VARIANTS, room, weipipe
from partool_runtime.parallel.weipipe.chunks import Chunk
from partool_runtime.parallel.weipipe.lanes import Lane
from partool_runtime.parallel.weipipe.passes import WeiPipePasses
from partool_runtime.parallel.weipipe.program import Compute, Shift, ShiftGroup, compile_program
from partool_runtime.parallel.weipipe.shifts import LentBuffers

CPU = torch.device("cpu")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 5)
        self.b = nn.LayerNorm(5)
        self.b.bias.requires_grad_(False)


def test_chunks_hold_every_parameter_once_and_aligned() -> None:
    module = Small()
    chunk = Chunk(module)
    assert (chunk.weight_elements, chunk.gradient_elements) == (16 + 8 + 8 + 8, 16 + 8 + 8)
    assert chunk.trained == ("a.weight", "a.bias", "b.weight")
    flat = torch.full((chunk.weight_elements + 3,), torch.nan, dtype=torch.bfloat16)
    chunk.pack(module, flat)
    for name, view in chunk.weights(flat).items():
        assert torch.equal(view, module.get_parameter(name).detach().bfloat16())
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert view.storage_offset() % 8 == 0
    assert flat.isfinite().sum() == sum(p.numel() for p in module.parameters())


def test_chunks_are_the_same_on_the_meta_device() -> None:
    with torch.device("meta"):
        there = Small()
    assert Chunk(there).weights(torch.arange(40.0))["b.weight"].tolist() == [24.0, 25.0, 26.0, 27.0, 28.0]


def test_gradients_are_collected_in_the_wider_type_and_leave_the_leaves() -> None:
    chunk = Chunk(Small())
    leaves = chunk.leaves(torch.zeros(chunk.weight_elements, dtype=torch.bfloat16))
    assert [name for name, leaf in leaves.items() if not leaf.requires_grad] == ["b.bias"]
    leaves["a.bias"].grad = torch.full((5,), 1.5, dtype=torch.bfloat16)
    flat = torch.full((chunk.gradient_elements,), 9.0)
    chunk.collect(leaves, flat)
    found = chunk.gradients(flat)
    assert found["a.bias"].tolist() == [1.5] * 5
    assert not found["a.weight"].any()
    assert not found["b.weight"].any()
    assert leaves["a.bias"].grad is None


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_programs_fit_their_room_and_use_all_shifts(name: str, rounds: int, chunks: int) -> None:
    schedule = generate(name, 4, 4 * rounds, chunks)
    for one in (schedule, weipipe(name, 4, 4 * rounds - 2, chunks, 4 * chunks)):
        for rank in range(4):
            program = compile_program(one, rank)
            done = [action for step in program for action in _actions(step)]
            assert done == list(one.lists[rank])
            for step in program:
                if isinstance(step, ShiftGroup):
                    last = [action.kind.startswith("SEND") and to != 0 for action, to in step.shifts]
                    assert last == sorted(last), "the executor posts these sends last"
            _replay(one, rank, program)


def _actions(step: ShiftGroup | Compute | Shift) -> list[Action]:
    return [action for action, _ in step.shifts] if isinstance(step, ShiftGroup) else [step.action]


def _replay(schedule: object, rank: int, program: tuple[ShiftGroup | Compute | Shift, ...]) -> None:
    """Check that concurrent receives have room, that data read is present, and that nothing is left at the end."""
    held: set[int] = set()
    own = schedule.on_rank(rank)
    for step in program:
        if isinstance(step, ShiftGroup):
            comes = [action.stage for action, _ in step.shifts if action.kind.startswith("RECV")]
            assert not held & set(comes)
            held |= set(comes)
            assert len(held) <= room(schedule, rank).weights
            assert {a.stage for a, _ in step.shifts} <= held | set(own)
            held -= step.releases
        elif isinstance(step, Compute) and step.action.kind != "W":
            assert step.action.stage in held or step.action.stage in own
            if step.releases:
                held.remove(step.action.stage)
    assert not held


def test_a_graph_is_kept_where_its_backward_pass_comes_next() -> None:
    kept = [step.action for step in compile_program(generate("weipipe", 3, 6), 1) if getattr(step, "keeps", False)]
    assert kept == [Action("F", 2, 1), Action("F", 2, 4)]


def test_activations_have_another_executor() -> None:
    with pytest.raises(ValueError, match="1f1b does not let weights travel"):
        compile_program(generate("1f1b", 2, 2), 0)


def test_lanes_keep_order_and_pass_errors_on() -> None:
    lane, seen, gate = Lane("test", CPU), [], threading.Event()
    first = lane.submit(gate.wait)
    tickets = [lane.submit(lambda number=number: seen.append(number)) for number in range(5)]
    assert not first.ended
    gate.set()
    assert first.wait()
    tickets[-1].wait()
    assert seen == list(range(5))
    broken = lane.submit(lambda: 1 // 0)
    after = lane.submit(lambda: seen.append(9))
    for ticket in (broken, after):
        with pytest.raises(ZeroDivisionError):
            ticket.wait()
    assert 9 not in seen
    lane.close()
    lane.close()
    assert not any(thread.name == "test" for thread in threading.enumerate())


def test_pools_lend_the_oldest_and_do_not_wait_for_ever() -> None:
    pool = LentBuffers(2, 3, torch.float32, CPU)
    one, two = pool.take(1.0), pool.take(1.0)
    assert one is not None
    assert two is not None
    assert pool.take(0.01) is None
    pool.give(two)
    pool.give(one)
    assert pool.take(1.0) is two


def test_what_does_not_fit_is_refused() -> None:
    model = SimpleNamespace(first=nn.Embedding(3, 2), stages=[nn.Linear(2, 2), nn.Linear(2, 2)], last=nn.Linear(2, 1))
    ring = SimpleNamespace(rank=0, size=2)
    schedule = generate("weipipe", 2, 2)
    for wrong, message in (
        (generate("weipipe", 3, 3), "the schedule is for 3 ranks, the ring has 2"),
        (generate("weipipe", 2, 2, 2), "the schedule has 4 stages, the model 2"),
        (weipipe("weipipe", 2, 2, 1, 1), "the embedding is trained"),
        (replace(schedule, moves="activations"), "does not let weights travel"),
    ):
        with pytest.raises(ValueError, match=message):
            WeiPipePasses(wrong, model, ring, torch.float32)
