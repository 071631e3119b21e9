"""The trainer's decisions, with stand-ins for its parts; the real parts run in tests/parity and tests/launch."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partool.plan.profiling import ProfileRequest, traces, write_request
from partool.spec.judging import BestSpec
from partool.spec.model import ModelConfig
from partool.spec.training import CheckpointSpec
from partool_runtime.errors import ConfigurationError
from partool_runtime.jobs.train import loop, saving, trainer
from partool_runtime.jobs.train.keeping import ValidationVerdict
from partool_runtime.jobs.train.validating import Validator
from partool_runtime.model import Decoder
from partool_runtime.parallel import apply as parallel
from partool_runtime.parallel.recompute import recompute
from partool_runtime.precision import SMALLEST_SCALE, LossScaler
from partool_runtime.pulse import SILENT
from partool_runtime.stop import StopRequest
from partool_runtime.telemetry import profile
from partool_runtime.telemetry.profile import StepProfiler

CONFIG = ModelConfig(layers=3, hidden=12, ffn_hidden=20, heads=3, kv_heads=3, head_dim=4, vocab=17, max_position=8)
NO_PROFILE = StepProfiler(Path("/nonexistent"), 0, torch.device("cpu"))


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(policy: Any) -> Counter[str]:
    model = Decoder(CONFIG)
    recompute(model.layers, [policy] * CONFIG.layers)
    tokens_BS = torch.arange(14).reshape(2, 7) % CONFIG.vocab
    with Count() as count:
        model(tokens_BS, tokens_BS).backward()
    return count.calls


def test_recomputation_does_again_what_its_policy_says() -> None:
    none, selective, full = (operators(policy) for policy in ("none", "selective", "full"))
    assert none["aten.silu.default"] == CONFIG.layers
    assert selective["aten.silu.default"] == full["aten.silu.default"] == 2 * CONFIG.layers
    assert selective["aten.mm.default"] == none["aten.mm.default"]
    assert full["aten.mm.default"] > none["aten.mm.default"]


def test_every_block_runs_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def compiled(forward: Any) -> Any:
        return lambda *args, **kwargs: (ran.append(1), forward(*args, **kwargs))[1]

    monkeypatch.setattr(torch, "compile", compiled)
    model = Decoder(CONFIG)
    parallel.compile_blocks(model.layers)
    tokens_BS = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens_BS, tokens_BS)
    assert len(ran) == CONFIG.layers


class Fakes:
    """A run of 4 steps with a validation every 2; records the calls in order."""

    def __init__(
        self, stop_in_validation_of: int | None = None, verdicts: dict[int, ValidationVerdict] | None = None
    ) -> None:
        self.verdicts = verdicts or {}
        self.log: list[str] = []
        self.profiler = NO_PROFILE
        self.due_with: list[list[float]] = []
        """The sums of the saver's flags, step by step."""
        self.stop = StopRequest()
        self._at = stop_in_validation_of

    def run(self, first: int) -> tuple[int, str]:
        plan: Any = SimpleNamespace(
            training=SimpleNamespace(steps=4, validation=SimpleNamespace(every=2), ema=None),
            data=SimpleNamespace(validates=True, holds_out=True),
            weights=SimpleNamespace(source="init"),
            model=CONFIG,
        )
        recorder: Any = SimpleNamespace(
            timer=lambda term: nullcontext(),
            step=lambda *args, **more: None,
            event=self.event,
            validation=lambda step, *_, **more: self.log.append(f"validated {step}"),
            early_stop=lambda step, reason: self.log.append(reason),
        )
        saver: Any = SimpleNamespace(
            due=lambda done, flags: bool(self.due_with.append(flags)),
            flags=lambda: [0.25],
            save=self.save,
            finished_write=lambda: None,
            judge=lambda step, figures: self.verdicts.get(step, ValidationVerdict(False, "")),
        )
        stepper: Any = SimpleNamespace(step=self.step, validate=self.validate, preferences=None, teacher=None)
        data: Any = SimpleNamespace(step=lambda step: [], validation=lambda name: iter([1, 2, 3]), sets=())
        validator = Validator(plan, stepper, data, self.stop, SILENT)
        parts = (plan, stepper, data, saver, recorder, self.stop, self.profiler, validator)
        return loop.TrainingLoop(*parts).steps(first)

    def event(self, kind: str, **data: Any) -> None:
        self.log.append(f"profile {data['first']} {data['last']}" if kind == "profile" else kind)

    def step(self, step: int, batch: Any, timer: Any, flags: Any = tuple) -> Any:
        self.log.append(f"step {step + 1}")
        self.done = step + 1
        return SimpleNamespace(
            loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, skipped=False, flags=flags(), local=False, multi_token_loss=None
        )

    def validate(self, batches: Any, stopping: Any, *, averaged: bool) -> Any:
        for micro in batches:
            if stopping():
                return None
            if micro == 1 and self._at == self.done:
                self.stop._signal = 15
        return 1.0, 1

    def save(self, step: int, *, wait: bool = False) -> None:
        self.log.append(f"saved {step}" + " and waited" * wait)


def test_a_stop_reaches_into_validation_and_the_state_is_saved() -> None:
    fakes = Fakes(stop_in_validation_of=2)
    assert fakes.run(0) == (2, "")
    assert fakes.log == ["step 1", "step 2", "signal", "saved 2 and waited"]


def test_each_part_gets_the_sums_of_its_own_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for a profile takes effect in the next step, and reaches neither the saver nor the stop."""
    monkeypatch.setattr(profile, "_POLL_S", 0.0)
    fakes = Fakes()
    fakes.profiler = StepProfiler(tmp_path, 0, torch.device("cpu"))
    write_request(tmp_path, ProfileRequest(steps=2))
    assert fakes.run(0) == (4, "")
    assert fakes.log == ["step 1", "step 2", "validated 2", "step 3", "profile 2 3", "step 4", "saved 4", "validated 4"]
    assert fakes.due_with == [[0.25]] * 4
    assert [steps for steps, _, _ in traces(tmp_path)] == [(2, 3)]


def test_a_resumed_run_makes_up_for_the_validation_that_a_stop_cut_off() -> None:
    fakes = Fakes()
    fakes.done = 2
    assert fakes.run(2) == (4, "")
    assert fakes.log == ["validated 2", "step 3", "step 4", "saved 4", "validated 4"]


@pytest.mark.parametrize(
    ("change", "warned"),
    [({}, True), ({"loss": 2.9}, False), ({"grad_norm": 0.1}, False), ({"source": "hf"}, False), ({"first": 1}, False)],
)
def test_a_fresh_model_that_learns_nothing_is_told_of(change: dict[str, Any], warned: bool) -> None:
    """Gemma's embedding times zero: a loss of ln 17 to the last digit, without gradients."""
    found = {"loss": math.log(17), "grad_norm": 0.0, "source": "init", "first": 0} | change
    plan: Any = SimpleNamespace(model=CONFIG, weights=SimpleNamespace(source=found["source"]))
    result: Any = SimpleNamespace(**Fakes().step(0, None, None).__dict__ | found)
    said: list[str] = []
    recorder: Any = SimpleNamespace(step=lambda *args, **more: None, warning=said.append)
    saver: Any = SimpleNamespace(finished_write=lambda: None)
    unused: Any = SimpleNamespace(preferences=None, teacher=None)
    loop.TrainingLoop(plan, unused, unused, saver, recorder, StopRequest(), NO_PROFILE, unused)._record(
        found["first"] + 1, result
    )
    assert bool(said) == warned
    assert all("PT690: the first loss, 2.8332, is 1.00 × ln 17" in message for message in said)


def test_scale_at_its_floor_is_resumed_and_other_precisions_are_not() -> None:
    scaler = LossScaler(True)
    while scaler.scale > SMALLEST_SCALE:
        scaler.update(False)
    for _ in range(5):
        scaler.update(True)
    again = LossScaler(True)
    again.load(scaler.state())
    assert again.state() == scaler.state()
    fresh = LossScaler(True)
    fresh.load(LossScaler(False).state())
    assert fresh.state() == LossScaler(True).state()


def test_time_between_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = saving.Saver.__new__(saving.Saver)
    saver._ranks = SimpleNamespace(rank=0)  # type: ignore[assignment]
    saver._every_steps, saver._every_s, saver._saved_at_s = 0, 60.0, 100.0
    saver._stepper, saver._saved_step, saver._owed = SimpleNamespace(nonfinite_in_row=0), -1, False  # type: ignore[assignment]
    monkeypatch.setattr(saving.time, "monotonic", lambda: 159.0)
    assert saver.flags() == [0.0]
    assert not saver.due(7, saver.flags())
    monkeypatch.setattr(saving.time, "monotonic", lambda: 160.0)
    assert saver.due(7, saver.flags())
    saver._ranks = SimpleNamespace(rank=1)  # type: ignore[assignment]
    assert saver.flags() == [0.0]  # the clock of rank 0 decides
    assert saver.due(7, [1.0])
    saver._every_s = 0.0
    assert saver.flags() == []


def saver_on(folder: Path, keep: int, every: int | str = 1, best: BestSpec | None = None) -> Any:
    """A saver of one weight, whose stepper reports the number of consecutive skipped steps."""
    plan: Any = SimpleNamespace(
        checkpoint=CheckpointSpec(every=every, keep=keep, dir=None, mode="sync", best=best),
        training=SimpleNamespace(early_stop=None),
        layout=SimpleNamespace(offload=SimpleNamespace(optimizer="none")),
        model=CONFIG,
        adapter=None,
        optimizer=SimpleNamespace(name="adamw"),
    )
    ranks: Any = SimpleNamespace(rank=0, world_size=1, world=SimpleNamespace(size=lambda: 1), device=None)
    optimizer: Any = SimpleNamespace(
        masters=dict, state=dict, settle=lambda: None, numbers=dict, placed_state=dict, average=None
    )
    parts: dict[str, Any] = {
        "model": nn.Linear(2, 1), "optimizer": optimizer, "scaler": LossScaler(False), "fingerprint": "f",
        "stepper": SimpleNamespace(nonfinite_in_row=0),
    }  # fmt: skip
    parts["model"].placements = {}
    return saving.Saver(plan, folder, ranks, **parts)


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-????????"))


def run_steps(saver: Any, finite: str, first: int = 1) -> None:
    """Run a step per letter: ``.`` is an update, ``x`` is skipped."""
    for done, letter in enumerate(finite, first):
        saver._stepper.nonfinite_in_row = 0 if letter == "." else saver._stepper.nonfinite_in_row + 1
        if saver.due(done):
            saver.save(done)


def test_skipped_steps_save_and_prune_nothing(tmp_path: Path) -> None:
    """The third update gives weights without finite gradients: the checkpoints before it must stay."""
    saver = saver_on(tmp_path, keep=2)
    run_steps(saver, "...")
    assert saved(tmp_path) == [2, 3]
    run_steps(saver, "xxxx", 4)
    assert saved(tmp_path) == [2, 3]
    saver.save(7)  # a stop signal: its checkpoint is for the resumed run, and no other is deleted for it
    assert saved(tmp_path) == [2, 3, 7]
    run_steps(saver, "..", 8)
    assert saved(tmp_path) == [8, 9]
    saver.close()


def test_a_checkpoint_that_was_due_while_steps_were_skipped_is_made_up_for(tmp_path: Path) -> None:
    saver = saver_on(tmp_path, keep=3, every=4)
    run_steps(saver, "...xx...")
    assert saved(tmp_path) == [6, 8]
    saver.close()


def test_of_one_kept_checkpoint_the_one_before_stays_until_it_is_proven(tmp_path: Path) -> None:
    saver = saver_on(tmp_path, keep=1)
    run_steps(saver, "...")
    assert saved(tmp_path) == [2, 3]  # the weights of step 2 gave finite gradients, those of step 3 are not tried
    run_steps(saver, "xx", 4)
    assert saved(tmp_path) == [2, 3]
    run_steps(saver, ".", 6)
    assert saved(tmp_path) == [3, 6]
    saver.close()


def test_the_best_checkpoints_stay_beside_the_newest(tmp_path: Path) -> None:
    saver = saver_on(tmp_path, keep=1, every=2, best=BestSpec(keep=2))
    losses = {3: 2.0, 6: 3.0, 9: 1.0, 12: 5.0, 15: math.nan, 18: 4.0}
    kept = {}
    for step in range(1, 20):
        run_steps(saver, ".", step)
        if step in losses and saver.judge(step, {"loss": losses[step]}).best:
            saver.save(step)
        kept[step] = saved(tmp_path)
    # The newest is kept until a step has used the next one.
    assert kept[3] == [2, 3]
    assert kept[8] == [3, 6, 8]
    assert kept[10] == [3, 9, 10]  # the third best is not kept
    assert kept[19] == [3, 9, 16, 18]
    saver.close()
    went_on = saver_on(tmp_path, keep=1, every=2, best=BestSpec(keep=1))
    went_on.begin(8)  # the run goes on from step 8: its later validations do not count
    run_steps(went_on, "..", 9)
    assert saved(tmp_path) == [3, 10]
    went_on.close()


def test_a_validation_may_end_the_run() -> None:
    fakes = Fakes(verdicts={2: ValidationVerdict(True, "early stop: no")})
    assert fakes.run(0) == (2, "early stop: no")
    assert fakes.log == ["step 1", "step 2", "validated 2", "saved 2 and waited", "early stop: no"]
    fakes = Fakes(verdicts={2: ValidationVerdict(True, ""), 4: ValidationVerdict(False, "early stop: no")})
    assert fakes.run(0) == (4, "")  # all steps are done anyway
    assert fakes.log == ["step 1", "step 2", "validated 2", "saved 2", "step 3", "step 4", "saved 4", "validated 4"]


def test_threads_and_determinism_are_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    called: dict[str, Any] = {}
    monkeypatch.setattr(torch, "set_num_threads", lambda n: called.update(threads=n))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: called.update(deterministic=on))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def plan(tuned: tuple[str, ...] = ()) -> Any:
        return SimpleNamespace(
            kernels=SimpleNamespace(mode="auto", tuned=tuned),
            devices=SimpleNamespace(threads_per_rank=3, backend="cuda"),
            training=SimpleNamespace(seed=1, deterministic=True),
        )

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    trainer.configure_process(plan())
    assert called == {"threads": 3, "deterministic": True}
    called.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as the agent sets it
    trainer.configure_process(plan())
    assert "threads" not in called
    with pytest.raises(ConfigurationError, match="missing: does not exist") as found:
        trainer.configure_process(plan(("missing",)))
    assert found.value.code == "PT492"
