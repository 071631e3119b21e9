"""The recorder on a fake clock: terms, medians, log steps, measures, closing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _telemetry import small_plan
from rich.console import Console

from partool.plan.event_log import event_log, read_events
from partool.plan.types import Plan
from partool_runtime.errors import ConfigurationError, Preempted
from partool_runtime.telemetry import Recorder
from partool_runtime.telemetry._console import ConsoleLines
from partool_runtime.telemetry._events import EventWriter
from partool_runtime.telemetry.summary import MeasuredValue, Measures
from partool_runtime.torch_internals.collectives import _Waits, finished

CPU = torch.device("cpu")


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Case:
    """A recorder, its clock and its output."""

    def __init__(self, run_dir: Path, plan: Plan, rank: int = 0, world_size: int = 1) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.clock = FakeClock()
        self.out = StringIO()
        display = ConsoleLines(plan.training.steps, Console(file=self.out, width=100))
        self.recorder = Recorder(
            plan, run_dir, rank=rank, world_size=world_size, device=CPU, now=self.clock, display=display
        )

    def spend(self, term: str, seconds: float) -> None:
        with self.recorder.timer(term):
            self.clock.now += seconds

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e["data"] for e in read_events(event_log(self.run_dir, self.rank)) if e["kind"] == kind]


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Callable[..., Case]]:
    made: list[Case] = []

    def make(run_dir: Path = tmp_path, rank: int = 0, world_size: int = 1, **plan: Any) -> Case:
        made.append(Case(run_dir, small_plan(**plan), rank, world_size))
        return made[-1]

    yield make
    for one in made:
        one.recorder.close(1, "end of the test")  # which waits for no other rank


def test_terms_add_up_per_step_and_may_not_nest_or_be_unknown(case: Callable[..., Case]) -> None:
    c = case()
    c.clock.now += 77  # building the model
    c.recorder.event("start", attempt=1)
    for seconds in (1.0, 2.0):
        c.spend("forward", seconds)
        c.spend("backward", 2 * seconds)
    with pytest.raises(ValueError, match="unknown time term 'foward'"):
        c.recorder.timer("foward")
    with c.recorder.timer("data"):
        with pytest.raises(RuntimeError, match="'forward' inside timer 'data'"), c.recorder.timer("forward"):
            pass
        with pytest.raises(RuntimeError, match="inside timer 'data'"):
            c.recorder.step(1, 1.0)
    c.clock.now += 0.5
    c.recorder.step(1, 1.0, tokens=57)
    (step,) = c.events("step")
    assert step["terms_s"] == {"forward": 3.0, "backward": 6.0, "data": 0.0}
    assert step["step_time_s"] == 9.5
    assert step["tokens_per_s"] == pytest.approx(57 / 9.5)
    for number in range(2, 11):
        c.spend("forward", 4.0)
        c.recorder.step(number, 1.0, tokens=10)
    later = [event["tokens_per_s"] for event in c.events("step")[1:] if "tokens_per_s" in event]
    assert later == [pytest.approx(10 / 4.0)] * 2, "a line counts the steps since the line before"


def test_medians_leave_out_warm_up_checkpoint_and_validation_steps(case: Callable[..., Case]) -> None:
    c = case(steps=20)
    for step in range(1, 12):
        slow = {1: 50.0, 2: 50.0, 5: 70.0, 8: 90.0}.get(step, 1.0 + step / 100)
        c.spend("forward", slow)
        c.recorder.step(step, 1.0, tokens=10)
        if step == 7:  # 5 was saved in the background, reported in step 8
            c.recorder.event("checkpoint", step=5, path="x", write_s=1.0, blocked_s=0.1)
        if step == 9:
            c.clock.now += 1000.0
            c.recorder.validation(9, 2.0, 100)
    steps = {s["step"]: s["step_time_s"] for s in c.events("step")}
    assert steps[10] == pytest.approx(1.10)  # the validation's time belongs to no step
    # 3, 4, 6, 7, 9, 11 count
    assert c.recorder.measures().time["forward"].value == pytest.approx((1.06 + 1.07) / 2)
    assert c.recorder.measures().time["total"].value == pytest.approx((1.06 + 1.07) / 2)


def test_medians_leave_out_profiled_steps_and_no_step_has_the_time_of_writing(case: Callable[..., Case]) -> None:
    c = case(steps=20)
    for step in range(1, 10):
        c.spend("forward", 50.0 if step in (5, 6, 7) else 1.0 + step / 100)
        c.recorder.step(step, 1.0, tokens=10)
        if step == 6:
            c.clock.now += 1000.0
            c.recorder.event("profile", first=5, last=6)
    assert {s["step"]: s["step_time_s"] for s in c.events("step")}[7] == pytest.approx(50.0)
    assert c.recorder.measures().time["total"].value == pytest.approx((1.04 + 1.08) / 2)  # 3, 4, 8, 9


def test_lazy_figures_are_read_on_log_steps_only(case: Callable[..., Case]) -> None:
    read: list[int] = []
    c = case(steps=12, log_every=5)
    for step in range(1, 13):

        def loss(step: int = step) -> float:
            read.append(step)
            return float(step)

        c.recorder.step(step, loss, torch.tensor(2.0 * step), 0.1)
    assert read == [1, 5, 10, 12]
    assert [(s["step"], s["loss"], s["grad_norm"]) for s in c.events("step")] == [(n, n, 2 * n) for n in read]


def test_rank_0_logs_every_step_others_log_steps_only(case: Callable[..., Case]) -> None:
    zero, one = case(world_size=2), case(rank=1, world_size=2)
    for c in (one, zero):
        for step in range(1, 13):
            c.clock.now += 1
            c.recorder.step(step, 1.0, 1.0, 1.0)
    assert [s["step"] for s in one.events("step")] == [1, 5, 10, 12]
    assert [s["step"] for s in zero.events("step")] == list(range(1, 13))


def test_console_lines(case: Callable[..., Case]) -> None:
    c = case(steps=100, log_every=5, peak_flops=1e10)
    for step in range(1, 8):
        c.clock.now += 0.5
        c.recorder.step(step, 4.0 / step, 0.25, 3e-4, 1000, skipped=step == 5)
    c.recorder.validation(7, 1.25, 10)
    first, fifth, validation = c.out.getvalue().splitlines()
    assert first.startswith("step   1/100  loss 4.0000  grad norm 0.250  lr 3.00e-04  tokens/s 2,000  memory ")
    # 3e9 FLOP in 0.5 s of a device that could do 1e10 per second; 95 steps of 0.5 s are left
    assert fifth.startswith("step   5/100  loss 0.8000  grad norm 0.250  lr 3.00e-04  tokens/s 2,000  step time 500 ms")
    assert fifth.endswith("MFU 60.0%  ETA 48s  skipped: gradient not finite")
    assert validation == "step   7/100  validation loss 1.2500"


def test_sampled_step_counts_saved_tensors_and_changes_nothing(case: Callable[..., Case], tmp_path: Path) -> None:
    def train(c: Case) -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        x = torch.randn(7, 3, dtype=torch.float64)
        for step in range(1, 4):
            for _ in range(2):
                with c.recorder.timer("forward"):
                    loss = torch.tanh(x @ weight.t()).square().sum()
                with c.recorder.timer("backward"):
                    loss.backward()
            with c.recorder.timer("optimizer"), torch.no_grad():
                assert weight.grad is not None
                weight -= 0.01 * weight.grad
            c.recorder.step(step, loss.item())
        return weight.detach()

    sampled, plain = case(), case(tmp_path / "plain")
    plain.recorder._sampler._possible = False
    assert torch.equal(train(sampled), train(plain))
    # x for the product, tanh's result (saved by tanh and by square): the parameter does not count
    assert sampled.recorder.measures().memory["activations"] == MeasuredValue((7 * 3 + 7 * 5) * 8, "saved-tensor hook")
    assert sampled.recorder.measures().traffic["gradient_sync"] == MeasuredValue(0, "collective counter")
    assert "activations" not in plain.recorder.measures().memory


def test_logits_and_what_is_saved_after_the_first_pass_do_not_count(case: Callable[..., Case]) -> None:
    c = case()  # 2 sequences of 10 tokens, 32 words
    head = torch.nn.Parameter(torch.randn(32, 8))
    hidden = torch.randn(20, 8, requires_grad=True)
    labels = torch.zeros(20, dtype=torch.int64)
    c.recorder.step(1, 1.0)
    for _ in range(2):
        with c.recorder.timer("forward"):
            loss = torch.nn.functional.cross_entropy((hidden * 2) @ head.t(), labels)
        with c.recorder.timer("backward"):
            loss.backward()
    c.recorder.step(2, 1.0)
    saved = c.recorder.measures().memory["activations"].value
    small = 64  # labels' weight sum
    assert 20 * 8 * 4 + 20 * 8 <= saved <= 20 * 8 * 4 + 20 * 8 + small


def test_an_error_inside_the_sampled_step_ends_the_sampling(case: Callable[..., Case]) -> None:
    c = case()
    c.recorder.step(1, 1.0)
    with pytest.raises(KeyError), c.recorder.timer("forward"):
        raise KeyError
    c.recorder.close(1, "KeyError")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    torch.randn(3, requires_grad=True).exp()
    assert c.recorder._sampler._saved.live_bytes == 0


def test_blocking_collectives_are_taken_out_of_the_pass_they_are_called_in(
    case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: list[FakeClock] = []

    def slow(*args: Any, **kwargs: Any) -> None:
        clock[0].now += 0.25

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        monkeypatch.setattr(dist, name, slow)
    c = case(world_size=2)
    clock.append(c.clock)
    for step in range(1, 4):
        with c.recorder.timer("forward"):
            c.clock.now += 1
            dist.all_gather_into_tensor(None, None)
        with c.recorder.timer("backward"):
            c.clock.now += 2
            dist.reduce_scatter_tensor(None, None)
            dist.all_reduce(None)
            other = threading.Thread(target=dist.all_reduce, args=(None,))  # not the training thread's time
            other.start()
            other.join()
        with c.recorder.timer("optimizer"):
            dist.all_reduce(None)
        c.recorder.step(step, 1.0)
    times = c.recorder.measures().time
    assert {term: times[term].value for term in times if term != "overhead"} == {
        "forward": 1.0,
        "parameter_gather": 0.25,
        "backward": 2.25,
        "gradient_sync": 0.5,
        "optimizer": 0.25,
        "total": 4.25,
    }
    assert times["gradient_sync"].measure == "timer around collectives"
    with c.recorder.timer("forward"):
        dist.all_gather_into_tensor(None, None, async_op=True)
    assert "parameter_gather" not in c.recorder.measures().time  # it does not block, so it is not measured
    c.recorder.close()
    assert dist.all_reduce is slow


def test_waits_for_exchanges_of_passes_are_tensor_parallelism_s(
    case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = case(world_size=2)

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        c.clock.now += 0.5
        return tensor

    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", wait)
    for step in range(1, 4):
        for term, seconds in (("forward", 1.0), ("backward", 2.0), ("optimizer", 4.0)):
            with c.recorder.timer(term):
                c.clock.now += seconds
                finished(torch.zeros(()))
        c.recorder.step(step, 1.0)
    times = c.recorder.measures().time
    found = {term: times[term].value for term in ("forward", "backward", "tensor_parallel", "optimizer")}
    assert found == {"forward": 1.0, "backward": 2.0, "tensor_parallel": 1.0, "optimizer": 4.5}
    assert times["tensor_parallel"].measure == "timer around collectives"
    c.recorder.close()
    assert _Waits.around is None


def test_memory_notes_keep_the_largest_and_refuse_unknown_terms(case: Callable[..., Case]) -> None:
    c = case()
    for size in (5, 9, 3):
        c.recorder.note_memory("gradients", size)
    assert c.recorder.measures().memory["gradients"] == MeasuredValue(9.0, "counted tensors")
    with pytest.raises(ValueError, match="unknown memory term 'grads'"):
        c.recorder.note_memory("grads", 1)


def test_probes_look_in_the_sampled_step_only_and_keep_the_largest(case: Callable[..., Case]) -> None:
    c = case()
    values = iter([5, 9, 2])
    c.recorder.probe_memory("gathered", lambda: next(values))
    weight = torch.nn.Parameter(torch.ones(3))
    for step in range(1, 4):
        with c.recorder.timer("forward"):
            loss = (weight * 2 * weight).sum() if step == 2 else weight.sum()
        with c.recorder.timer("backward"):
            loss.backward()
        c.recorder.step(step, 1.0)
    assert next(values, None) is None  # during the forward pass, after it, and after the backward pass
    assert c.recorder.measures().memory["gathered"] == MeasuredValue(9, "counted tensors")
    with pytest.raises(ValueError, match="unknown memory term 'x'"):
        c.recorder.probe_memory("x", lambda: 0)


def test_rank_0_waits_for_the_others_and_prints_the_table(case: Callable[..., Case], tmp_path: Path) -> None:
    old = EventWriter(tmp_path, 1)  # from an earlier attempt
    old.write(
        "summary", {"scope": "rank", "measures": Measures(memory={"total": MeasuredValue(1e15, "old")}).to_json()}
    )
    old.close()
    zero, one = case(world_size=2), case(rank=1, world_size=2)
    for c, seconds in ((zero, 1.0), (one, 3.0)):
        for step in range(1, 5):
            c.spend("forward", seconds)
            c.recorder.step(step, 1.0)
    late = threading.Timer(0.2, one.recorder.close)
    late.start()
    zero.recorder.close(0, "all steps done")
    late.join()
    data = json.loads((tmp_path / "summary.json").read_text())
    assert (data["ranks"], data["world_size"]) == (2, 2)
    (forward,) = [t for t in data["terms"] if (t["section"], t["term"]) == ("time", "forward")]
    assert forward["measured"] == 2.0
    assert forward["ratio"] == pytest.approx(200)
    assert zero.events("summary")[-1] == {"scope": "run", **data}
    assert zero.events("end") == [{"step": 4, "exit_code": 0, "reason": "all steps done"}]
    text = zero.out.getvalue()
    assert "predicted and measured (all ranks)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["forward", "10.0", "ms", "2.00", "s", "200.00", "timer,", "collectives", "apart"] in lines
    assert ["pipeline_bubble", "10.0", "ms", "–", "not", "measured"] in lines


def test_ranks_without_a_log_here_are_not_waited_for(case: Callable[..., Case], tmp_path: Path) -> None:
    c = case(world_size=3)
    c.recorder.step(1, 1.0)
    c.recorder.close()
    assert json.loads((tmp_path / "summary.json").read_text())["ranks"] == 1


@pytest.mark.parametrize(
    ("error", "code", "errors"),
    [(RuntimeError("boom"), 1, 1), (ConfigurationError("PT601", "no"), 78, 1), (Preempted("SIGTERM"), 75, 0)],
)
def test_leaving_by_an_exception_closes_with_its_exit_code(
    case: Callable[..., Case], error: Exception, code: int, errors: int
) -> None:
    c = case()
    c.recorder.step(1, 1.0)
    with pytest.raises(type(error)), c.recorder:
        raise error
    (end,) = c.events("end")
    assert (end["step"], end["exit_code"]) == (1, code)
    assert [e["type"] for e in c.events("error")] == [type(error).__name__] * errors
    assert all("Traceback" in e["traceback"] for e in c.events("error"))


def test_a_second_attempt_appends(case: Callable[..., Case], tmp_path: Path) -> None:
    case().recorder.close(1, "first")
    with event_log(tmp_path, 0).open("ab") as file:
        file.write(b'{"v": 1, "kind": "st')
    c = case()
    c.recorder.close(0, "second")
    assert [e["reason"] for e in c.events("end")] == ["first", "second"]
