"""The recorder of a rank's training."""

from __future__ import annotations

import atexit
import statistics
import time
import traceback as tracebacks
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from partool.plan.event_log import EventKind
from partool.plan.terms import MEMORY_TERMS
from partool.plan.types import Plan
from partool_runtime.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, exit_code
from partool_runtime.pulse import SILENT, Pulse
from partool_runtime.telemetry._closing import close_run
from partool_runtime.telemetry._collectives import EXCHANGES, BlockingCollectives
from partool_runtime.telemetry._console import Display, open_display
from partool_runtime.telemetry._events import EventWriter
from partool_runtime.telemetry._figures import TrainingFigures
from partool_runtime.telemetry._lasting import LastingDisplay
from partool_runtime.telemetry._memory import peak_bytes, resident_bytes
from partool_runtime.telemetry._pipeline import BUBBLE, PipelineSteps, Ran
from partool_runtime.telemetry._run_row import write_run_row
from partool_runtime.telemetry._sample import SAMPLED_STEP, StepSampler
from partool_runtime.telemetry._slow import LEAST_AT_END, LEAST_STEPS, SlowWatch
from partool_runtime.telemetry._timers import Clock, CudaClock, HostClock, Spans, seconds_per_term
from partool_runtime.telemetry._trackers import Trackers
from partool_runtime.telemetry._validation import ContinuedPrompt, SetFigures, messages, named_events
from partool_runtime.telemetry.profile import snapshot_of_failure
from partool_runtime.telemetry.summary import TOTAL, MeasuredValue, Measures, RowJson, median_terms, mfu

Number = float | torch.Tensor | Callable[[], float] | None
"""A figure of a step. On every rank, tensors are read and functions are called on log steps only."""

WARMUP_STEPS = 2
"""Number of steps at the start of an attempt that medians leave out, including the sampled step."""
_HISTORY = 4096
_RECENT = 50


@dataclass(slots=True)
class _Step:
    """A step whose time marks may not have been read yet."""

    step: int
    start: Any
    end: Any
    spans: list[tuple[str, Clock, Any, Any]]
    tokens: int
    steady: bool
    values: dict[str, Number]
    skipped: bool


class Recorder:
    """Times the terms of every step; writes event log, console and closing summary, and starts the run's trackers.

    ``step`` is called once after every optimizer step, on every rank. Between log steps nothing waits for the
    device. As a context manager, the recorder is closed at exit, with the exit code of the error, if any.
    """

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        now: Callable[[], float] = time.perf_counter,
        display: Display | None = None,
        pulse: Pulse = SILENT,
    ) -> None:
        self._plan, self._run_dir, self._rank, self._world_size = plan, run_dir, rank, world_size
        self._device = device
        self._pulse = pulse
        self._total_steps = plan.training.steps
        host = HostClock(now)
        self._host = host
        self._clock: Clock = CudaClock() if device.type == "cuda" else host
        self._spans = Spans(self._clock, host)
        self._opened_at = time.time()
        self._memory = self._first_memory()
        self._host_memory: dict[str, MeasuredValue] = {}
        self._trackers = Trackers(plan, run_dir, self.warning, self._tell) if rank == 0 else None
        self._events = EventWriter(run_dir, rank)
        self._sampler = StepSampler(plan, self._spans, rank)
        self._pipeline = PipelineSteps(plan, self._spans, host)
        self._collectives = BlockingCollectives(self._spans, host) if device.type == "cpu" else None
        self._pending: list[_Step] = []
        self._history: deque[tuple[int, dict[str, float]]] = deque(maxlen=_HISTORY)
        self._unsteady: set[int] = set()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._slow = SlowWatch(plan)
        self._interval: tuple[int, float] = (0, 0.0)
        self._figures = TrainingFigures(0, self._total_steps)
        self._attempt_steps = 0
        self._steady = True
        self._closed = False
        self._display: Display | None = display
        if rank == 0 and display is None:
            self._display = LastingDisplay(open_display(plan.name, self._total_steps))
        if self._collectives is not None:
            self._collectives.install()
            if plan.layout.compile != "none":  # waits inside compiled layers cannot be timed
                self._collectives.asynchronous.update(EXCHANGES)
        atexit.register(self.close, EXIT_FAILED, "ended without closing the recorder")
        self._start = self._clock.mark()

    def timer(self, term: str) -> AbstractContextManager[None]:
        """Return a context manager that adds its time to a term of ``TIME_TERMS``.

        Raises ValueError for an unknown term and, when entered, RuntimeError inside another timer.
        """
        self._pulse.beat()
        return self._spans.timer(term)

    def expect(self, steps: int) -> None:
        """Set the number of the run's steps, where only its data tell it."""
        self._total_steps = steps
        self._figures = replace(self._figures, total_steps=steps)
        if self._display is not None:
            self._display.expect(steps)

    def is_log_step(self, step: int) -> bool:
        """Return whether this step's figures are shown: the first, every ``log_every``-th, and the last."""
        return step == 1 or step % self._plan.training.log_every == 0 or step == self._total_steps

    def step(  # noqa: PLR0917 - the order of the event's fields
        self,
        step: int,
        loss: Number = None,
        grad_norm: Number = None,
        lr: Number = None,
        tokens: int | None = None,
        skipped: bool = False,
        *,
        multi_token_loss: float | None = None,
    ) -> None:
        """End step ``step``, counted from 1; ``tokens`` is the number of tokens of all ranks (default: as planned).

        ``multi_token_loss`` is the mean loss of predictions of further tokens; None for a model without.
        """
        if self._spans.open is not None:
            raise RuntimeError(f"the step ended inside timer {self._spans.open!r}")
        end, host_start = self._clock.mark(), self._host.mark()
        self._sampler.disarm()
        self._attempt_steps += 1
        if tokens is None:
            tokens = self._plan.training.global_batch * self._plan.training.sequence_length
        steady = self._steady and self._attempt_steps > WARMUP_STEPS
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr}
        values |= {} if multi_token_loss is None else {"multi_token_loss": multi_token_loss}
        log = self.is_log_step(step)
        if log and (ran := self._pipeline.log(step, steady=steady)) is not None:
            self._events.write("pipeline", ran)
        self._pending.append(_Step(step, self._start, end, self._spans.take(), tokens, steady, values, skipped))
        self._start, self._steady = end, True
        if log:
            self._flush(log=True)
            if self._trackers is not None:
                self._trackers.hear()
        elif self._device.type != "cuda":
            self._flush(log=False)
        if self._attempt_steps == SAMPLED_STEP - 1:
            self._sampler.arm()
        self._spans.add("overhead", self._host, host_start, self._host.mark())
        self._pulse.stepped(step)

    def pipeline(self, actions: Ran, sent_bytes: int | None = None) -> None:
        """Take the executed actions of the current step, on the host's clock.

        The actions' waits count as ``pipeline_bubble``; on log steps the actions are written as an event.
        If ``actions`` is a function, it is called only on log steps, where waiting for the device does no harm, and
        only waits in log steps count.
        ``sent_bytes`` are the bytes that this rank sent to other ranks of its pipeline in the step.
        """
        self._pipeline.take(actions, sent_bytes)

    def event(self, kind: EventKind, **data: Any) -> None:
        """Append an event of kind ``kind`` to the log.

        The first step's time begins with the event ``start``. A checkpoint's ``step``, and the step in which the
        checkpoint is reported, are excluded from the medians, as are profiled steps and the one after them.
        """
        self._events.write(kind, data)
        if kind == "start":
            self._start = self._clock.mark()
        if kind == "checkpoint":
            self._steady = False
            self._unsteady.add(data.get("step", 0))
        if kind == "profile":
            self._steady = False
            if not self._spans.begun:  # writing a trace is no part of a step
                self._start = self._clock.mark()
            self._unsteady.update(range(data["first"], data["last"] + 1))
        if self._display is not None and kind == "checkpoint" and "step" in data:
            self._display.message(f"checkpoint at step {data['step']}")

    def warning(self, message: str) -> None:
        """Record a warning for the user, and show it."""
        self._events.write("warning", {"message": message})
        self._tell(f"warning: {message}")

    def _tell(self, message: str) -> None:
        if self._display is not None:
            self._display.message(message)

    def note_preferences(self, figures: Mapping[str, float]) -> None:
        """Take means over pairs of answers, which the next log step shows."""
        self._figures = replace(self._figures, preferences=figures)

    def note_kl(self, kl: float | None) -> None:
        """Take the mean divergence of a teacher from the model, which the next log step shows; None without one."""
        self._figures = replace(self._figures, kl=kl)

    def validation(
        self,
        step: int,
        loss: float,
        tokens: int,
        preferences: Mapping[str, float] | None = None,
        *,
        weights_loss: float | None = None,
        sets: Mapping[str, SetFigures] = MappingProxyType({}),
        samples: Sequence[ContinuedPrompt] = (),
    ) -> None:
        """Record a validation that has just ended; the step after it is excluded from the medians.

        ``preferences`` are the means over pairs of answers, ``weights_loss`` the loss of the weights themselves where
        ``loss`` is that of their average, ``sets`` the figures of named sets, ``samples`` the prompts with
        what the model adds.

        The time of a validation between two steps belongs to neither step; inside a step it counts as part of the step.
        """
        self._steady = False
        if not self._spans.begun:
            self._start = self._clock.mark()
        total = SetFigures(loss, tokens, preferences, weights_loss)
        named = {"sets": named_events(sets)} if sets else {}
        texts = {"samples": [each.event() for each in samples]} if samples else {}
        self._events.write("validation", {"step": step, **total.event(), **named, **texts})
        if self._display is not None:
            self._display.validation(step, loss)
            for message in messages(total, sets):
                self._display.message(message)

    def early_stop(self, step: int, reason: str) -> None:
        """Record that validations end the run after ``step`` steps, and show why."""
        self._events.write("early_stop", {"step": step, "reason": reason})
        if self._display is not None:
            self._display.message(reason)

    def note_memory(self, term: str, size_bytes: int, measure: str = "counted tensors") -> None:
        """Record bytes of a memory term that the caller has counted; the largest value of a run is kept.

        Raises ValueError for a term that is not in ``MEMORY_TERMS``.
        """
        _check_memory_term(term)
        old = self._memory.get(term)
        if old is None or size_bytes > old.value:
            self._memory[term] = MeasuredValue(float(size_bytes), measure)

    def note_host_memory(self, terms_bytes: Mapping[str, int]) -> None:
        """Record bytes of host memory, by keys of ``HOST_TERMS``."""
        self._host_memory = {term: MeasuredValue(float(size), "counted tensors") for term, size in terms_bytes.items()}

    def probe_memory(self, term: str, count_bytes: Callable[[], int]) -> None:
        """Register a function that counts a memory term's bytes, called in the sampled step; the largest value is kept.

        Raises ValueError for a term that is not in ``MEMORY_TERMS``.
        """
        _check_memory_term(term)
        self._sampler.add_probe(term, count_bytes)

    def measures(self) -> Measures:
        """Return this rank's measurements so far: medians over steady steps, peaks, counters."""
        memory, times = dict(self._memory), {}
        if (peak := peak_bytes(self._device)) is not None:
            how = "CUDA allocator's peak" if self._device.type == "cuda" else "peak resident memory"
            memory[TOTAL] = MeasuredValue(float(peak), how)
        for term, value in median_terms(terms for step, terms in self._history if step not in self._unsteady).items():
            times[term] = MeasuredValue(value, self._time_measure(term))
        # On a GPU, only exchanges after the passes are timed.
        unseen = set(EXCHANGES) if self._collectives is None else self._collectives.asynchronous
        times = {term: m for term, m in times.items() if term not in unseen}
        return (
            Measures(memory, times, {}, self._host_memory)
            .merged(self._sampler.measures())
            .merged(self._pipeline.measures())
        )

    def close(self, exit_code: int = EXIT_DONE, reason: str = "") -> None:
        """Write summary and last event, restore the terminal, print the closing table; calling again does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._sampler.disarm()
        if self._collectives is not None:
            self._collectives.remove()
        if exit_code in (EXIT_DONE, EXIT_PREEMPTED):
            self._flush(log=False)
            self._warn_if_slow(LEAST_AT_END)
        mine = self.measures()
        self._events.write("summary", {"scope": "rank", "measures": mine.to_json()})
        tail: list[Any] = []
        if self._rank == 0:
            clean = exit_code in (EXIT_DONE, EXIT_PREEMPTED)
            table, data = close_run(
                self._plan, self._run_dir, self._world_size, mine, self._opened_at, wait=clean, slow=self._slow.said
            )
            self._events.write("summary", {"scope": "run", **data})
            tail = [table] if clean and self._history else []
            if clean:
                self._write_run_row(data["terms"], reason)
        self._events.write("end", {"step": self._figures.step, "exit_code": exit_code, "reason": reason})
        if self._trackers is not None:
            self._trackers.close()
        self._events.close()
        if self._display is not None:
            self._display.close(tail)

    def _write_run_row(self, terms: list[RowJson], reason: str) -> None:
        counted = [step for step, _ in self._history if step not in self._unsteady]
        if (problem := write_run_row(self._plan, self._run_dir, terms, counted, reason or "done")) is not None:
            self._events.write("warning", {"message": problem})

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        code = exit_code(error)
        if code != EXIT_PREEMPTED and not self._closed:
            text = "".join(tracebacks.format_exception(error))
            self.event("error", type=type(error).__name__, message=str(error), traceback=text)
            if (snapshot := snapshot_of_failure(self._run_dir, self._rank, error)) is not None:
                self.warning(f"what held the GPU's memory: {snapshot}, for https://pytorch.org/memory_viz")
        self.close(code, "preempted" if code == EXIT_PREEMPTED else f"{type(error).__name__}: {error}")

    def _first_memory(self) -> dict[str, MeasuredValue]:
        if self._device.type != "cpu" or (resident := resident_bytes()) is None:
            return {}
        return {"framework": MeasuredValue(float(resident), "resident memory at start")}

    def _time_measure(self, term: str) -> str:
        if term == TOTAL:
            return "timer, median step"
        if term == BUBBLE:
            return "waits for other stages"
        if self._collectives is None or self._world_size == 1:
            return "timer"
        if term in ("gradient_sync", "parameter_gather", *EXCHANGES):
            return "timer around collectives"
        return "timer, collectives apart" if term in ("forward", "backward") else "timer"

    def _flush(self, *, log: bool) -> None:
        """Read the marks of the steps since the last call; on a log step also the values of the newest step."""
        steps, self._pending = self._pending, []
        for index, item in enumerate(steps):
            newest = index == len(steps) - 1
            values = {name: _read(value, force=log and newest) for name, value in item.values.items()}
            self._record(item, values, log=log and newest)

    def _record(self, item: _Step, values: dict[str, float | None], *, log: bool) -> None:
        step_time_s = self._clock.elapsed_s(item.start, item.end)
        terms_s = seconds_per_term(item.spans)
        if item.steady:
            self._history.append((item.step, {**terms_s, TOTAL: step_time_s}))
            self._recent.append(step_time_s)
            self._slow.count()
        self._interval = self._interval[0] + item.tokens, self._interval[1] + step_time_s
        self._figures = self._latest(item, values)
        if log:
            self._figures = replace(self._figures, memory_bytes=peak_bytes(self._device))
            self._interval = (0, 0.0)
        if log or (self._rank == 0 and values["loss"] is not None):
            self._write_step(item, values, step_time_s, terms_s, log=log)
        self._show(log=log)
        if log:
            self._warn_if_slow(LEAST_STEPS)

    def _warn_if_slow(self, least: int) -> None:
        """Warn once, on rank 0, that steps take longer than planned, as soon as there are enough steps to be sure."""
        recent = [terms for step, terms in islice(reversed(self._history), _RECENT) if step not in self._unsteady]
        if self._rank == 0 and len(recent) >= least and (said := self._slow.look(median_terms(recent))):
            self.warning(said)

    def _latest(self, item: _Step, values: dict[str, float | None]) -> TrainingFigures:
        tokens, seconds = self._interval
        typical = statistics.median(self._recent) if self._recent else None
        flops, peak = self._plan.prediction.time.model_flops, self._plan.devices.peak_flops
        return replace(
            self._figures,
            step=item.step,
            loss=values["loss"],
            multi_token_loss=values.get("multi_token_loss"),
            grad_norm=values["grad_norm"],
            lr=values["lr"],
            tokens_per_s=tokens / seconds if seconds > 0 else None,
            step_time_s=typical,
            mfu=None if typical is None else mfu(flops, typical, peak, self._world_size),
            eta_s=None if typical is None else typical * (self._total_steps - item.step),
            skipped=item.skipped,
        )

    def _write_step(
        self, item: _Step, values: dict[str, float | None], step_time_s: float, terms_s: dict[str, float], *, log: bool
    ) -> None:
        figures = self._figures
        data: dict[str, Any] = {
            "step": item.step,
            **values,
            "tokens": item.tokens,
            "step_time_s": round(step_time_s, 7),
            "terms_s": {term: round(value, 7) for term, value in terms_s.items()},
            "skipped": item.skipped,
        }
        if log:
            data |= {"tokens_per_s": figures.tokens_per_s, "mfu": figures.mfu, "memory_bytes": figures.memory_bytes}
            if figures.preferences is not None:
                data["preferences"] = dict(figures.preferences)
            if figures.kl is not None:
                data["kl"] = figures.kl
        self._events.write("step", data)

    def _show(self, *, log: bool) -> None:
        if self._display is None:
            return
        if not log:
            self._display.tick(self._figures)
            return
        self._display.log(self._figures)


def _check_memory_term(term: str) -> None:
    if term not in MEMORY_TERMS:
        raise ValueError(f"unknown memory term {term!r}; known: {', '.join(MEMORY_TERMS)}")


def _read(value: Number, *, force: bool) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if value is None or not force:
        return None
    return float(value()) if callable(value) else float(value.item())
