"""Parts of the pipeline's engine that need no other process: deferred weight gradients, buffers, programs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partool.schedule import Action, after, generate, posts, remap, validate
from partool_runtime import deferral
from partool_runtime.model.loss import loss
from partool_runtime.parallel.pipeline import wires
from partool_runtime.parallel.pipeline.handover import unfinished
from partool_runtime.parallel.pipeline.passes import PipelinePasses
from partool_runtime.parallel.pipeline.program import Arrival, compile_program, halved, until
from partool_runtime.parallel.pipeline.types import Boundary, split_linears
from partool_runtime.parallel.pipeline.wires import TransferError, _Buffers, connected

WEIGHTS = ("0.weight", "0.bias", "2.weight")


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False)).double()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
@pytest.mark.parametrize("recomputed", [False, True])
def test_weight_gradients_come_with_the_second_half(shape: tuple[int, ...], recomputed: bool) -> None:
    whole, split = net(), net()
    x = torch.randn(shape, dtype=torch.float64)
    one, two = (x.clone().requires_grad_() for _ in range(2))
    whole(one).square().sum().backward()
    split_linears(split)
    split_linears(split)
    sink: list[deferral.Work] = []
    with deferral.splitting():
        out = checkpoint(split, two, use_reentrant=False) if recomputed else split(two)
    with deferral.splitting(), deferral.collecting(sink):
        out.square().sum().backward()
    torch.testing.assert_close(two.grad, one.grad, rtol=1e-12, atol=1e-12)
    early = gradients(split)
    assert [name for name, grad in early.items() if grad is None] == list(WEIGHTS)
    for work in sink:
        work()
    for name, grad in gradients(whole).items():
        assert not gradients(split)[name].requires_grad
        torch.testing.assert_close(gradients(split)[name], grad, rtol=1e-12, atol=1e-12)


def test_split_layers_do_whole_backward_passes_too_and_frozen_weights_get_nothing() -> None:
    whole, split = net(), net()
    split_linears(split)
    for model in (whole, split):
        model[0].requires_grad_(False)
    x = torch.randn(4, 5, dtype=torch.float64)
    whole(x).sum().backward()
    with deferral.splitting():
        out = split(x)
    out.sum().backward()
    assert split[0].weight.grad is None
    torch.testing.assert_close(split[2].weight.grad, whole[2].weight.grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad(), deferral.splitting():
        assert split(x).grad_fn is None


@pytest.mark.parametrize("biased", [False, True])
def test_the_heads_gradient_waits_too_but_not_that_of_a_chunked_loss(biased: bool) -> None:
    hidden, labels = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[1, -100, 4], [0, 2, -100]])
    for chunk_logits, waits in ((2**26, True), (14, False)):
        head = nn.Linear(5, 7, bias=biased, dtype=torch.float64)
        loss(hidden, head.weight, labels, bias_V=head.bias).backward()
        expected = [parameter.grad for parameter in head.parameters()]
        head.zero_grad()
        sink: list[deferral.Work] = []
        with deferral.splitting():
            total = loss(hidden.requires_grad_(), head.weight, labels, chunk_logits, bias_V=head.bias)
        with deferral.splitting(), deferral.collecting(sink):
            total.backward()
        assert all((parameter.grad is None) == waits for parameter in head.parameters())
        for work in sink:
            work()
        found = [parameter.grad for parameter in head.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_work_is_put_off_only_where_it_is_collected() -> None:
    done: list[int] = []
    assert not deferral.defer(partial(done.append, 1))
    sink: list[deferral.Work] = []
    with deferral.collecting(sink):
        assert deferral.defer(partial(done.append, 2))
    assert not deferral.defer(partial(done.append, 3))
    assert (done, len(sink)) == ([], 1)


def test_a_buffer_is_used_again_when_nothing_holds_it() -> None:
    buffers = _Buffers(Boundary((2, 3), torch.float64, torch.device("cpu")))
    first = buffers.take()
    where = first.data_ptr()
    lent = buffers.lend(first)
    del first
    factor = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    graph = factor * lent
    part = lent[0]
    held: list[object] = [lent, graph, part]
    del lent, graph, part
    while held:
        assert buffers.take().data_ptr() != where
        held.pop(0)
    assert buffers.take().data_ptr() == where


def test_until_a_cut_everything_made_has_arrived() -> None:
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("hanayo", 4), ("zb-v", 2)):
        schedule = generate(name, 3, 3, chunks)
        for steps in range(0, sum(map(len, schedule.lists)), 3):
            done = after(schedule, steps)
            first = until(schedule, done)
            sent = [a for actions in first.lists for a in actions if a.kind.startswith("SEND")]
            received = [a for actions in first.lists for a in actions if a.kind.startswith("RECV")]
            rest = remap(schedule, done, schedule.placement)
            computed = {a for actions in first.lists for a in actions}
            both = [*first.lists[0], *rest.lists[0]]
            assert len(sent) == len(received)
            assert sorted(both) == sorted(schedule.lists[0])
            assert validate(rest, executed=computed) == []
            programs = [compile_program(first, rank, halved(schedule)) for rank in range(3)]
            waiting = {action for program in programs for action, _ in program.unclaimed}
            expected = {
                (kind, stage, batch)
                for stage in range(schedule.stages)
                for kind, batches in zip("FB", _waiting(schedule, computed, stage), strict=True)
                for batch in batches
            }
            assert {(a.kind[-1], a.stage, a.micro_batch) for a in waiting} <= expected


def _waiting(schedule, done, stage):
    work = unfinished(schedule, done, stage)
    return work.inputs, work.gradients


def test_what_a_stage_has_begun() -> None:
    schedule = generate("zb-h1", 2, 3)
    done = {Action("F", 0, b) for b in range(3)} | {Action("F", 1, 0), Action("I", 1, 0), Action("F", 1, 1)}
    first, second = (unfinished(schedule, done, stage) for stage in (0, 1))
    assert (first.inputs, first.gradients, first.in_flight, first.halfway) == ((), (0,), (0, 1, 2), ())
    assert (second.inputs, second.gradients, second.in_flight, second.halfway) == ((2,), (), (1,), (0,))


def test_an_error_of_a_shift_counts_turns() -> None:
    error = TransferError(1, Action("RECV_FW", 2, 5), 0, "gone")
    assert str(error) == "pipeline rank 1, 2RECV_FW5 (stage 2, turn 5) from pipeline rank 0: gone"


def test_ranks_that_talk_to_each_other_have_a_wire_of_their_own():
    assert connected((0, 1)) == [(0, 1), (1, 0)]
    assert connected((0, 1, 2)) == [(0, 1), (1, 0), (1, 2), (2, 1)], "the last stage sends nothing to the first"
    assert {(2, 0), (0, 2)} <= set(connected((0, 1, 2, 0, 1, 2)))
    assert connected((0, 2, 1, 3)) == [(0, 2), (1, 2), (1, 3), (2, 0), (2, 1), (3, 1)]
    assert (0, 2) not in connected((0, 1, 2, 3, 3, 2, 1, 0))


def test_programs_post_where_the_order_says() -> None:
    """A rank's calls post each message once, before the action at which the common order has it posted."""
    schedule = generate("interleaved", 2, 4, 2)
    for rank, expected in enumerate(posts(schedule)):
        program = compile_program(schedule, rank, halved(schedule))
        names = {arrival: action for step in program.steps for arrival, action in _arrivals(program, step)}
        found = {at: tuple(names[one] for one in step.posts) for at, step in enumerate(program.steps) if step.posts}
        assert found == expected
        assert program.last_posts == ()


def _arrivals(program, step):
    for sender, actions in program.inbound.items():
        for place, action in enumerate(actions):
            yield Arrival(sender, place), action


def test_a_wait_asks_without_pause_only_at_first(monkeypatch) -> None:
    """A transfer that takes 1 ms, on an emulated clock on which a question takes 10 microseconds."""
    now_s, pauses = [0.0], []

    class Work:
        def is_completed(self) -> bool:
            now_s[0] += 1e-5
            return now_s[0] > 1e-3

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(wires.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(wires.time, "sleep", sleep)
    wire = wires.Wires(0, wires.Lines((0, 1), {}), Boundary((1,), torch.float32, torch.device("cpu")), timeout_s=1)
    wire._poll(Work(), 0.0, Action("RECV_F", 0, 0), 1)
    first = pauses.index(wires.PAUSE_S)
    assert set(pauses[:first]) == {0}
    assert set(pauses[first:]) == {wires.PAUSE_S}
    assert 5 <= first <= 15
    monkeypatch.setattr(Work, "is_completed", lambda self: bool(now_s.__setitem__(0, now_s[0] + 1e-5)))
    with pytest.raises(TransferError, match="nothing moved for 1 s"):
        wire._poll(Work(), now_s[0], Action("RECV_F", 0, 0), 1)


def test_evaluations_keep_no_times_of_earlier_batches() -> None:
    engine = SimpleNamespace(schedule=SimpleNamespace(micro_batches=2), watch=None)

    def evaluate(together: list[object]) -> torch.Tensor:
        for micro in together:
            engine.watch(micro)
        return torch.tensor(float(len(together)))

    engine.evaluate = evaluate
    ranks: Any = SimpleNamespace(device=torch.device("cpu"))
    none: Any = None
    passes = PipelinePasses(cast(Any, engine), none, none, ranks, tied=None, tensor=None, report=none)
    total = passes.evaluate(cast(Any, [object() for _ in range(9)]), lambda: False)
    assert total == 9.0
    assert len(passes._timed_actions) <= 2
