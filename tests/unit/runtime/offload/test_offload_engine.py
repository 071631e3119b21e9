"""The engine's steps equal, to the bit, those of one process that updates after all gradients are known."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import replace

import pytest
import torch
from _offload import KINDS, SHARDS, Case, Lender, Step, together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from partool_kernels.host import Part, Pool, StepRule, UpdatePass, update
from partool_runtime.errors import ConfigurationError
from partool_runtime.offload.buckets import fill_buckets
from partool_runtime.offload.buffers import Buffers
from partool_runtime.offload.engine import HostEngine
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.resident import _fused, share_note, tail
from partool_runtime.offload.undo import Undo

pytestmark = pytest.mark.timeout(120)

EVERYTHING = [
    Step(),
    Step(lr=2e-3, clip=1.0),
    Step(poison="b"),
    Step(missing=frozenset("c"), flushed=True),
    Step(clip=0.5, missing=frozenset("a"), shuffled=True),
    Step(left=True),
    Step(),
    Step(clip=1.0, poison="d"),
    Step(lr=5e-4),
]


@pytest.mark.parametrize(
    ("speculation", "micro_batches"), list(itertools.product(("none", "deferred", "undo"), (1, 3)))
)
def test_every_verdict_leaves_the_bits_of_the_reference(speculation: str, micro_batches: int) -> None:
    case = Case(speculation, micro_batches, lends_copies=True, resident=("d",))  # type: ignore[arg-type]
    with together(case) as both:
        both.go(EVERYTHING)
        assert both.done == 6
        assert isinstance(both.store, Lender)
        figures = both.engine.figures
        assert figures.late_buffers == 0
        assert (figures.speculated > 0) == (speculation != "none") == (figures.rejected > 0)


TYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, wide": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
}
shards = st.fixed_dictionaries(
    {
        "a": st.sampled_from([0, 1, 7, 2048]),
        "b": st.sampled_from([0, 2047, 2**16, 2**16 + 5]),
        "c": st.sampled_from([1, 2049]),
        "d": st.sampled_from([0, 1]),
        "e": st.sampled_from([3, 2**16 + 2**12]),
    }
)
steps = st.builds(
    Step,
    lr=st.sampled_from([0.0, 1e-3, 3e-2]),
    clip=st.sampled_from([math.inf, math.inf, 1.0, 1e-6]),
    poison=st.sampled_from(["", "", "", "a", "b", "e"]),
    missing=st.frozensets(st.sampled_from("abcde"), max_size=5),
    shuffled=st.booleans(),
    backwards=st.booleans(),
    flushed=st.booleans(),
    left=st.sampled_from([False] * 6 + [True]),
    loss_scale=st.sampled_from([1.0, 1.0, 1024.0]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    compute, wire = TYPES[draw(st.sampled_from(sorted(TYPES)))]
    return Case(
        speculation=draw(st.sampled_from(["none", "deferred", "undo"])),
        micro_batches=draw(st.integers(1, 3)),
        kind=draw(st.sampled_from(KINDS)),
        compute=compute,
        wire=wire,
        moments=None if compute == torch.float64 else draw(st.sampled_from([None, torch.bfloat16])),
        undo_buckets=draw(st.sampled_from([0, 1, 9])),
        spare=draw(st.integers(0, 2)),
        resident=draw(st.sampled_from([(), ("d",), ("e", "d"), tuple("abcde")])),
        in_host=draw(st.sampled_from([(), ("a", "b"), tuple("abcde")])),
        lends_copies=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


histories = given(cases(), shards, st.lists(steps, min_size=1, max_size=7))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@histories
def test_any_history_leaves_the_bits_of_the_reference(case: Case, sizes: dict[str, int], history: list[Step]) -> None:
    with together(case, sizes) as both:
        both.go(history)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@histories
def test_many_histories_leave_the_bits_of_the_reference(case: Case, sizes: dict[str, int], history: list[Step]) -> None:
    with together(case, sizes) as both:
        both.go(history)


def test_speculation_pauses_and_resumes_with_steps_pending() -> None:
    clipped, free = Step(clip=1.0), Step()
    with together(Case()) as both:
        both.go([free, clipped, clipped, free, free, free, free, free])
        # When steps four to six began, two of the last four had been rejected, and only one may be.
        assert (both.engine.figures.speculated, both.engine.figures.rejected) == (5, 2)


def test_undo_without_room_waits_for_the_norm() -> None:
    with together(Case("undo", undo_buckets=1)) as both:
        assert len(both.engine._buckets) == 3
        both.go([Step(), Step(clip=1.0), Step(poison="e"), Step()])
        assert both.engine.figures.put_off > 0
        assert both.engine.figures.rejected == 2


def test_tiny_budgets_commit_early_and_never_hang() -> None:
    with together(Case(spare=0)) as both:
        both.go([Step(), Step(), Step(clip=1.0), Step(poison="a"), Step()])
        figures = both.engine.figures
        # A step's first bucket finds no free buffer, so the previous step of the last bucket is committed early.
        assert figures.early_commits == 3
        assert figures.late_buffers == 0
    with together(Case(micro_batches=2, spare=1)) as both:
        # Two buckets fill at the same time where gradients arrive in an unexpected order.
        both.go([Step(shuffled=True) for _ in range(6)])
        assert both.engine.figures.early_commits == 0
        assert both.engine.figures.late_buffers > 0


def test_pinned_memory_is_as_much_as_was_allowed() -> None:
    buckets = fill_buckets(SHARDS.items(), 2**16)
    each = 2**16 * 2

    def taken(pinned_bytes: int, totals: torch.dtype | None = None) -> int:
        buffers = Buffers(
            buckets, gradients=torch.bfloat16, weights=torch.bfloat16, totals=totals, pinned_bytes=pinned_bytes
        )
        assert buffers._memory.held_bytes <= (pinned_bytes or math.inf)
        return len(buffers._free)

    assert len(buckets) == 5
    assert taken(0) == 7
    assert taken(8 * each) == 6
    assert taken(7 * each) == 5
    assert taken(5 * each, torch.float32) == 2
    assert taken(3 * each, torch.float32) == 1
    with pytest.raises(ConfigurationError, match=r"PT660: .* do not hold 5 buckets"):
        taken(7 * each - 1)
    with pytest.raises(ConfigurationError, match=r"PT660: .* do not hold 1 buckets"):
        taken(3 * each - 1, torch.float32)
    # Other holders' bytes count against the same limit.
    memory = HostMemory(pinned=False, limit_bytes=9 * each)
    memory.take(2 * each, "parameters")
    types = {"gradients": torch.bfloat16, "weights": torch.bfloat16, "totals": None}
    assert len(Buffers(buckets, **types, memory=memory, pinned_bytes=9 * each)._free) == 5
    with pytest.raises(ConfigurationError, match=r"PT660: 0.00 GiB of pinned memory, of 0.00, do not hold 5 buckets"):
        Buffers(buckets, **types, memory=memory, pinned_bytes=9 * each)


@pytest.mark.parametrize("speculation", ["none", "deferred", "undo"])
def test_an_error_on_the_thread_reaches_the_training_loop(speculation: str) -> None:
    before = threading.active_count()
    with together(Case(speculation, lends_copies=True)) as both:  # type: ignore[arg-type]
        both.step(Step())
        assert isinstance(both.store, Lender)
        both.store.fails_at = 1
        with pytest.raises(OSError, match="the disk is gone"):
            both.step(Step(clip=1.0))
        with pytest.raises(OSError, match="the disk is gone"):
            both.engine.begin(both.rules(2, 1e-3, 1.0))
        with pytest.raises(OSError, match="the disk is gone"):
            both.engine.flush()
    both.engine.close()
    assert threading.active_count() == before


def test_a_copy_that_fails_reaches_the_training_loop() -> None:
    with together(Case()) as both:
        engine: HostEngine = both.engine
        engine.begin(both.rules(1, 1e-3, 1.0))
        engine.arrive("a", torch.zeros(3))
        with pytest.raises(RuntimeError, match="size"):
            engine.sums()


def test_gradients_come_once_in_a_micro_batch() -> None:
    with together(Case()) as both:
        both.engine.begin(both.rules(1, 1e-3, 1.0))
        both.engine.arrive("a", torch.zeros(7))
        with pytest.raises(RuntimeError, match="a had two gradients in one micro-batch"):
            both.engine.arrive("a", torch.zeros(7))
        both.engine.arrive("b", torch.zeros(2**16 + 5))
        with pytest.raises(RuntimeError, match="a gradient of a came after its bucket had left"):
            both.engine.arrive("a", torch.zeros(7))


def test_what_was_read_ahead_is_what_is_needed() -> None:
    """Once the order of gradients is known, every bucket is prefetched, and none is read in vain."""
    for speculation, micro_batches in itertools.product(("none", "deferred", "undo"), (1, 2)):
        with together(Case(speculation, micro_batches, lends_copies=True)) as both:  # type: ignore[arg-type]
            assert isinstance(both.store, Lender)
            both.step(Step(backwards=True))
            assert both.store.surprises > 0 or speculation == "none"
            both.engine.flush()
            both.store.surprises = both.store.in_vain = 0
            both.store.asked.clear()
            verdicts = [Step(), Step(clip=1.0), Step(poison="a"), Step(flushed=True), Step(), Step()]
            both.go([replace(step, backwards=True) for step in verdicts])
            assert both.store.surprises == 0
            assert both.store.in_vain == len(both.store.asked) == 0


def test_figures() -> None:
    with together(Case()) as both:
        both.go([Step(), Step(clip=1.0)])
        figures = both.engine.figures
        weights = sum(SHARDS.values()) * 2
        assert figures.bytes_down == 2 * weights
        assert figures.bytes_up == 4 * weights  # once at the start, and again where the second step was rejected
        assert figures.passes_s > 0
        assert figures.waited_s > 0


@pytest.mark.parametrize(("arena_bytes", "elements"), [(0, 0), (9 * 2048 * 12 + 5, 9 * 2048), (2**30, 2**17 + 2048)])
def test_room_for_copies_is_taken_at_the_start(arena_bytes: int, elements: int) -> None:
    buckets = fill_buckets([("a", 2**16), ("b", 2**16 + 1)], 2**16)
    undo = Undo(buckets, arena_bytes, [torch.float32] * 3, pool=Pool(1), mode="auto")
    assert [len(tensor) for tensor in undo._arena] == [elements] * 3
    assert not any(tensor.any() for tensor in undo._arena)


def test_the_tail_that_stays_on_the_device() -> None:
    order = [("head", 10), ("layer", 40), ("norm", 2), ("embedding", 48)]
    assert tail(order, 0.0) == frozenset()
    assert tail(order, 0.2) == {"norm", "head"}  # 12 elements for a target of 20: nearer than the embedding's 48
    assert tail(order, 0.009) == frozenset()
    assert tail(order, 0.25) == {"embedding"}
    assert tail(order, 0.5) == {"embedding", "norm"}
    assert tail(order, 1.0) == {"embedding", "norm", "layer", "head"}
    assert tail([], 0.5) == frozenset()


def test_a_small_share_passes_over_what_is_too_large_for_it() -> None:
    layers = [(f"layer {index}", 60) for index in range(100)]
    assert tail([*layers, ("embedding", 500)], 0.01) == {"layer 99"}
    assert tail([*layers, ("embedding", 500)], 0.03) == {"layer 99", "layer 98", "layer 97"}


def test_a_share_that_whole_parameters_cannot_make_is_said() -> None:
    shards = [("layers", 7000), ("embedding", 525)]
    assert share_note(shards, tail(shards, 0.01), 0.01) == (
        "0.0% of the optimizer's state stays on the device, not 1.0%: only whole parameters do",
    )
    (note,) = share_note(shards, tail(shards, 0.04), 0.04)
    assert note.startswith("7.0% ")
    assert share_note(shards, tail(shards, 0.06), 0.06) == share_note(shards, (), 0.0) == share_note([], (), 0.5) == ()


def test_what_steps_on_a_gpu_agrees_with_what_steps_in_host_memory() -> None:
    """torch's fused AdamW, which updates states resident on a GPU, makes the same step but for the last bits."""
    draws = torch.Generator().manual_seed(3)
    master, first, gradient = torch.randn(3, 1001, generator=draws, dtype=torch.float64)
    second = torch.rand(1001, generator=draws, dtype=torch.float64)
    rule = StepRule("adamw", 1e-2, 0.9, 0.95, 1e-8, 0.1, 7, 0.5)
    mine = Part(master.clone(), (first.clone(), second.clone()))
    _fused(mine, gradient, rule)
    other = Part(master.clone(), (first.clone(), second.clone()))
    update([other], step=UpdatePass([gradient], [rule]))
    assert not torch.equal(mine.master, master)
    for one, same in zip((mine.master, *mine.moments), (other.master, *other.moments), strict=True):
        torch.testing.assert_close(one, same, rtol=1e-13, atol=1e-15)
