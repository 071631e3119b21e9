"""The training job, which is the work of one rank from the plan to the last checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from partool.plan.types import Plan
from partool_runtime.checkpoint import open_arena
from partool_runtime.data import Batches, open_data
from partool_runtime.errors import EXIT_DONE, EXIT_PREEMPTED, Preempted
from partool_runtime.fused.self_check import with_working_parts
from partool_runtime.jobs.process import configure_process, watch_compiler
from partool_runtime.jobs.train.reference import give_reference
from partool_runtime.jobs.train.saving import Saver
from partool_runtime.jobs.train.stepping import Stepper, StepResult
from partool_runtime.mesh import Ranks, close_ranks, open_ranks
from partool_runtime.offload.install import open_optimizer
from partool_runtime.optim.types import Optimizer
from partool_runtime.parallel.comm import maximum_over
from partool_runtime.parallel.expert.load import ExpertLoads
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.pulse import SILENT, Pulse
from partool_runtime.resuming import falls_back
from partool_runtime.stop import STOP_SIGNALS, StopRequest
from partool_runtime.telemetry import Recorder
from partool_runtime.telemetry.profile import FLAGS, StepProfiler
from partool_runtime.torch_internals.tensors import local, local_bytes
from partool_runtime.weights import checksum, fill, frozen_of, post_load

_UNIFORM, _STILL = 0.005, 1e-6
"""A model ignores its input if its first loss divided by ln V differs from 1 by less than ``_UNIFORM`` and its gradient
norm is at most ``_STILL``. An untrained model's gradient norm is about 0.1 to 100."""


def train(plan: Plan, run_dir: Path, resume: bool, stop: StopRequest, pulse: Pulse = SILENT) -> None:
    """Run the plan on this rank; ``resume`` continues from the newest checkpoint in ``run_dir``.

    Raises Preempted after a stop request, when the checkpoint is written, and ConfigurationError for an error that no
    retry fixes. After an error the process group stays open, because closing the group would wait for ranks that may
    have ended.
    """
    configure_process(plan)
    ranks = open_ranks(plan)
    stop.use(lambda value: maximum_over(value, ranks.world, ranks.device))
    with Recorder(
        plan, run_dir, rank=ranks.rank, world_size=ranks.world_size, device=ranks.device, pulse=pulse
    ) as recorder:
        pulse.enter("loading")
        data = open_data(plan, dp_rank=ranks.dp.place, dp_size=ranks.dp.size, barrier=ranks.barrier)
        for note in data.notes:
            recorder.warning(note)
        pulse.enter("preparing")
        watch_compiler(plan, pulse)
        prepared = prepare(with_working_parts(plan, ranks, recorder.warning), ranks, recorder.pipeline)
        stepper, saver, first = _open(
            plan, run_dir, ranks, recorder, prepared=prepared, data=data, resume=resume, pulse=pulse
        )
        attempt = int(os.environ.get("PARTOOL_ATTEMPT", "1"))
        recorder.event("start", attempt=attempt, world_size=ranks.world_size, plan_hash=plan.hash, resumed_from=first)
        if first >= plan.training.steps and ranks.rank == 0:
            print(f"nothing to do: the checkpoint holds {first} steps, training.steps is {plan.training.steps}")
        pulse.enter("training")
        profiler = StepProfiler(run_dir, ranks.rank, ranks.device, warn=recorder.warning)
        run = _Run(plan, stepper, data, saver, recorder, stop, profiler, pulse, _reports_loads(plan, ranks))
        with closing(profiler):
            steps_done = run.steps(first)
        data.close()
        with pulse.during("saving"):
            saver.close()
        pulse.enter("ending")
        _report_host(stepper.optimizer, recorder)
        stepper.optimizer.close()
        prepared.passes.close()
        prepared.memory.close()
        _report_write(saver, recorder)
        stopped = steps_done < plan.training.steps
        recorder.close(EXIT_PREEMPTED if stopped else EXIT_DONE, stop.reason if stopped else "all steps done")
    close_ranks(ranks)
    if stopped:
        raise Preempted(f"stopped by {stop.reason} after step {steps_done}")


@dataclass(frozen=True, slots=True)
class _Run:
    plan: Plan
    stepper: Stepper
    data: Batches
    saver: Saver
    recorder: Recorder
    stop: StopRequest
    profiler: StepProfiler
    pulse: Pulse = SILENT
    reports_loads: bool = False
    """Whether this rank reports the load of experts, for all ranks of its pipeline stages."""

    def steps(self, first: int) -> int:
        """Train from step ``first`` on and save the last state; return the number of completed steps."""
        steps, recorder = self.plan.training.steps, self.recorder
        if first > 0 and self._validates(first) and not self._validate(first):
            return first  # a stop may have come between the last step and its validation: repeat that
        for step in range(first, steps):
            self.profiler.before(step + 1)
            with recorder.timer("data"), self.pulse.during("fetching"):
                batch = self.data.step(step)
            result = self.stepper.step(step, batch, recorder.timer, self._flags)
            steps_done = step + 1
            with recorder.timer("overhead"):
                # In a local step ranks agree on nothing: stop requests and checkpoints wait for the next exchange.
                asked, passed, profile = self._parts(result.flags)
                stopping = not result.local and self.stop.heard(asked, steps_done)
                due = not result.local and self.saver.due(steps_done, passed)
                if not result.local:
                    self.profiler.heard(profile, steps_done)
                if stopping or steps_done == steps or due:
                    self._save(steps_done, wait=stopping)
            with self.pulse.during("logging"):
                self._record(steps_done, result)
                if (steps_profiled := self.profiler.after(steps_done)) is not None:
                    self._report_profile(*steps_profiled)
            if stopping and steps_done < steps:
                recorder.event("signal", name=self.stop.reason)
                return steps_done
            if self._validates(steps_done) and not self._validate(steps_done):
                self._save(steps_done, wait=True)
                return steps_done
        return steps

    def _save(self, steps_done: int, *, wait: bool) -> None:
        with self.pulse.during("saving"):
            self.saver.save(steps_done, wait=wait)

    def _flags(self) -> list[float]:
        """Return what this rank adds to the sums of a step: requests to stop and to profile, a due checkpoint."""
        return [*self.stop.flags(), *self.profiler.flags(), *self.saver.flags()]

    def _parts(self, flags: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Return the sums of the flags of requests to stop, of checkpoints that are due, and of requests to profile."""
        stops = len(STOP_SIGNALS)
        return flags[:stops], flags[stops + FLAGS :], flags[stops : stops + FLAGS]

    def _report_profile(self, first: int, last: int) -> None:
        self.recorder.event("profile", first=first, last=last)

    def _validate(self, steps_done: int) -> bool:
        """Report the loss on held-out data; return False on all ranks if a stop request ended the validation early."""

        def stopping() -> bool:
            self.pulse.beat()
            return self.stop.agree(steps_done)

        with self.pulse.during("validating"):
            result = self.stepper.validate(self.data.validation(), stopping)
        if result is None:
            self.recorder.event("signal", name=self.stop.reason)
            return False
        preferences = self.stepper.preferences
        figures = None if preferences is None else preferences.figures(trains=False)
        self.recorder.validation(steps_done, *result, figures)
        return True

    def _record(self, steps_done: int, result: StepResult) -> None:
        recorder, preferences = self.recorder, self.stepper.preferences
        if preferences is not None and recorder.is_log_step(steps_done):
            recorder.note_preferences(preferences.figures(trains=True))
        recorder.step(steps_done, result.loss, result.grad_norm, result.lr, result.tokens, result.skipped)
        if result.skipped:
            recorder.event("nonfinite", step=steps_done, consecutive=self.stepper.nonfinite_in_row)
        if steps_done == 1 and (problem := first_step_problem(self.plan, result)):
            recorder.warning(problem)
        _report_write(self.saver, recorder)
        if self.reports_loads and recorder.is_log_step(steps_done):
            _report_loads(steps_done, self.stepper.loads, recorder)

    def _validates(self, steps_done: int) -> bool:
        if not self.plan.data.validates:
            return False
        every = self.plan.training.validation.every
        return steps_done == self.plan.training.steps or (every > 0 and steps_done % every == 0)


def _reports_loads(plan: Plan, ranks: Ranks) -> bool:
    """Return whether this rank is the first of those that hold the same stages."""
    return plan.model.moe is not None and ranks.dp.place == ranks.cp.place == ranks.tp.place == 0


def _report_loads(step: int, loads: ExpertLoads | None, recorder: Recorder) -> None:
    layers = [] if loads is None else [asdict(each) | {"imbalance": each.imbalance} for each in loads.reports()]
    if layers:
        recorder.event("experts", step=step, layers=layers)


def first_step_problem(plan: Plan, result: StepResult) -> str:
    """Return a text about a problem in the first step of a model that is trained from scratch; empty without a problem.

    The loss of an untrained model begins near ln V, the loss of a uniform guess, but the loss must depend on the input.
    """
    uniform = math.log(plan.model.vocab)
    if plan.weights.source not in ("init", "dummy") or result.skipped or uniform == 0.0:
        return ""
    ratio = result.loss / uniform
    if abs(ratio - 1.0) >= _UNIFORM or result.grad_norm > _STILL:
        return ""
    return (
        f"PT690: the first loss, {result.loss:.4f}, is {ratio:.2f} × ln {plan.model.vocab}, and all gradients are zero "
        f"(norm {result.grad_norm:.1e}): the model sees nothing of its input and will not learn. "
        "See partool explain PT690"
    )


def _open(
    plan: Plan,
    run_dir: Path,
    ranks: Ranks,
    recorder: Recorder,
    *,
    prepared: Prepared,
    data: Batches,
    resume: bool,
    pulse: Pulse,
) -> tuple[Stepper, Saver, int]:
    """Load the state from the newest checkpoint or the plan's weights; return stepper, saver and the first step."""
    model = prepared.model
    arena = open_arena(ranks.device, prepared.memory, _room_bytes(plan))  # the optimizer freezes the memory
    optimizer = open_optimizer(plan, prepared, ranks)
    _count_memory(prepared, optimizer, ranks.device, recorder)
    scaler = LossScaler(plan.training.precision == "fp16")
    stepper = Stepper(
        prepared.passes,
        optimizer,
        scaler,
        ranks=ranks,
        training=plan.training,
        spec=plan.optimizer,
        kernels=plan.kernels.mode,
        loads=prepared.loads,
        preferences=prepared.preferences,
    )

    folder = None if plan.adapter is None else plan.adapter.weights

    def start() -> None:
        """Give the model the weights that training starts from."""
        masters, group = optimizer.masters(), ranks.world
        for note in fill(model, plan.weights, seed=plan.training.seed, masters=masters, adapter=folder, group=group):
            recorder.warning(note)
        optimizer.loaded()
        post_load(model)

    base = ""
    if plan.adapter is not None:  # checkpoints hold no frozen weights
        start()
        base = checksum(model, frozen_of(model, plan.frozen), ranks.world)
    saver = Saver(
        plan,
        run_dir,
        ranks,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        stepper=stepper,
        fingerprint=data.fingerprint,
        arena=arena,
        base=base,
    )
    if (copy := prepared.frozen_copy) is not None:
        fill(copy.model, plan.weights, seed=plan.training.seed, adapter=folder, group=ranks.world)
        post_load(copy.model)
    pulse.enter("loading")
    started = give_reference(plan, run_dir, ranks, prepared=prepared, data=data, start=start, pulse=pulse)
    fallback = falls_back(plan.resume.fallback, plan.launch.target, os.environ)
    first = saver.resume(fallback=fallback) if resume else 0
    for note in saver.notes:
        recorder.warning(note)
    if first > 0:  # a resumed run does not need its initial weights
        optimizer.loaded()
        post_load(model)
    elif not started and plan.adapter is None:
        start()
    return stepper, saver, first


def _room_bytes(plan: Plan) -> int | None:
    """Return the pinned memory that the plan leaves below the user's limit; None without a limit."""
    limit = plan.layout.offload.pinned_limit_bytes
    return max(0, limit - plan.prediction.memory.pinned_bytes) if limit else None


def _count_memory(prepared: Prepared, optimizer: Optimizer, device: torch.device, recorder: Recorder) -> None:
    """Give the recorder the bytes of each kind of device memory, and report the optimizer's notes to the user."""
    for note in optimizer.notes:
        recorder.warning(note)
    models = [prepared] if prepared.frozen_copy is None else [prepared, prepared.frozen_copy]
    recorder.note_memory("parameters", sum(_bytes_on(device, each.model.parameters()) for each in models))
    recorder.note_memory("optimizer", optimizer.state_bytes())
    recorder.probe_memory("gathered", lambda: sum(each.gathered_bytes() for each in models))
    recorder.probe_memory("gradients", lambda: prepared.gradient_bytes() + optimizer.gradient_bytes())


def _report_write(saver: Saver, recorder: Recorder) -> None:
    if stats := saver.finished_write():
        recorder.event("checkpoint", step=stats.step, path=stats.path, write_s=stats.write_s, blocked_s=stats.blocked_s)


def _report_host(optimizer: Optimizer, recorder: Recorder) -> None:
    """If the optimizer has a report, record it as the event ``offload``, and record the optimizer's host memory."""
    if report := optimizer.report():
        recorder.note_host_memory(optimizer.held_bytes())
        recorder.event("offload", **report)


def _bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's parts of ``tensors``; parts outside of ``device`` are not counted."""
    return local_bytes(tensor for tensor in tensors if local(tensor).device == device)
