"""Tasks of an evaluation over all ranks of a job: rank 0 hears what they ask, and every rank takes part."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from partool.plan.evaluation_result import EVALUATION_FILE, EvaluationResult
from partool.plan.task_results import REQUESTS_FILE, TaskResult
from partool.plan.types import Plan
from partool_runtime.data.batches import IGNORED_LABEL, MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.scoring import Scoring
from partool_runtime.pulse import Pulse
from partool_runtime.tasks.beside import TaskProcess
from partool_runtime.tasks.messages import I64, Scores, Windows, head_of, message

_WAIT, _READY, _SCORE, _RESULT, _FAILED = range(5)
"""What rank 0 tells the other ranks to do next."""
_WAIT_S = 2.0
"""Seconds after which rank 0 tells the others that the tasks are still at work, so that no rank waits for too long."""
_MULTIPLE = 64
"""Rows of a micro-batch are as long as the longest of them, rounded up to so many tokens, where layouts allow it."""


class TaskOrder(NamedTuple):
    """What all ranks do next."""

    kind: int
    rows: int = 0
    """Rows to score; of a failure, the bytes of its text."""
    tokens: int = 0


class TaskRunner:
    """The tasks of a plan. All methods but :meth:`close` are collectives of all ranks."""

    def __init__(self, plan: Plan, run_dir: Path, ranks: Ranks, scoring: Scoring | None, pulse: Pulse) -> None:
        """Start the process of the tasks on rank 0; it loads them while the ranks go on."""
        if scoring is None:
            raise ConfigurationError("PT416", "tasks do not run in this layout", "Plan it again.")
        self._plan, self._run_dir, self._ranks, self._scoring, self._pulse = plan, run_dir, ranks, scoring, pulse
        self._process = TaskProcess(plan, run_dir) if ranks.rank == 0 else None
        self._ready = False
        self.requests = 0
        """Number of requests of the last evaluation."""

    def wait(self, stopping: Callable[[], bool]) -> bool:
        """Wait until the tasks are loaded; return False once ``stopping``, on which ranks agree, returns True.

        Raises ConfigurationError on all ranks: PT538, PT539, PT603, PT639, PT641.
        """
        self._ready = self._ready or self._until(_READY, stopping) is not None
        return self._ready

    def evaluate(self, step: int, stopping: Callable[[], bool]) -> dict[str, TaskResult] | None:
        """Run the tasks with the model's weights; return their results, on ranks but the first without any metric.

        Rank 0 writes them, as of ``step``, into the run's folder. None once ``stopping``, on which ranks agree, returns
        True. Raises what :meth:`wait` raises, PT640 and PT642.
        """
        if not self.wait(stopping):
            return None
        if self._process is not None:
            self._process.send([message("evaluate")])
        answer = self._until(_RESULT, stopping)
        if answer is None:
            return None
        if self._process is None:
            return {}
        results = {name: _result(fields) for name, fields in answer["tasks"].items()}
        self.requests = len(answer["requests"])
        _write(self._run_dir, step, results, answer["requests"])
        return results

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _until(self, kind: int, stopping: Callable[[], bool]) -> Mapping[str, Any] | None:
        """Do what the tasks ask for until they send a message of a ``kind``; return it on rank 0, elsewhere nothing."""
        while True:
            order, parts, error = self._next()
            order = self._shared(order)
            self._pulse.beat()
            if order.kind == _FAILED:
                raise self._failure(order, error)
            if stopping():
                return None
            if order.kind == kind:
                return head_of(parts) if parts else {}
            if order.kind == _SCORE and not self._score(order, parts, stopping):
                return None

    def _next(self) -> tuple[TaskOrder, list[bytes], ConfigurationError | None]:
        """Return on rank 0 what the process wants, its message, and an error that ended it."""
        if self._process is None:
            return TaskOrder(_WAIT), [], None
        try:
            parts = self._process.heard(_WAIT_S)
        except ConfigurationError as error:
            return TaskOrder(_FAILED, len(_text_of(error))), [], error
        if parts is None:
            return TaskOrder(_WAIT), [], None
        kind = {"ready": _READY, "score": _SCORE, "result": _RESULT}[head_of(parts)["kind"]]
        if kind != _SCORE:
            return TaskOrder(kind), parts, None
        windows = Windows.from_parts(parts)
        return TaskOrder(kind, len(windows.lengths_R2), len(windows.tokens)), parts, None

    def _failure(self, order: TaskOrder, error: ConfigurationError | None) -> ConfigurationError:
        """Return the failure that rank 0 has heard of on all ranks: whichever ends first says what is wrong."""
        text = np.frombuffer(b"" if error is None else _text_of(error), np.uint8).astype(np.int64)
        return ConfigurationError(*json.loads(bytes(self._of_first(text, order.rows).astype(np.uint8))))

    def _shared(self, order: TaskOrder) -> TaskOrder:
        return TaskOrder(*self._of_first(np.array(order, np.int64), 3).tolist())

    def _of_first(self, numbers: I64, count: int) -> I64:
        """Return rank 0's ``count`` numbers on all ranks."""
        shared = (
            torch.from_numpy(numbers.copy()) if self._process is not None else torch.zeros(count, dtype=torch.int64)
        )
        array: I64 = sum_over(shared.to(self._ranks.device), self._ranks.world).cpu().numpy()
        return array

    def _score(self, order: TaskOrder, parts: Sequence[bytes], stopping: Callable[[], bool]) -> bool:
        """Score the rows of an order; return False if a stop ended it."""
        given = Windows.from_parts(parts) if parts else Windows(np.empty((0, 2), np.int64), np.empty(0, np.int64))
        lengths = self._of_first(given.lengths_R2.reshape(-1), 2 * order.rows).reshape(-1, 2)
        windows = Windows(lengths, self._of_first(given.tokens, order.tokens))

        def beating() -> bool:
            self._pulse.beat()
            return stopping()

        sums_2R = self._scoring.rows(task_batches(self._plan, self._ranks, windows), order.rows, beating)
        if sums_2R is None:
            return False
        if self._process is not None:
            self._process.send(Scores(sums_2R[0].numpy(), (sums_2R[1] == 0).numpy()).parts())
        return True


def _text_of(error: ConfigurationError) -> bytes:
    return json.dumps([error.code, error.message, error.help]).encode()


def task_batches(plan: Plan, ranks: Ranks, windows: Windows) -> list[MicroBatch]:
    """Return this rank's micro-batches of rows: padded on the right, with labels for the tokens that are scored.

    All ranks get the same number of micro-batches, whose rows have the same length on all ranks.
    """
    size, dp = plan.layout.micro_batch, ranks.dp
    lengths, most = windows.lengths_R2, plan.training.sequence_length
    ends = np.cumsum(lengths[:, 0])
    flexible = _takes_short_rows(plan)
    batches = []
    for first in range(0, len(lengths), size * dp.size):
        longest = int(lengths[first : first + size * dp.size, 0].max()) - 1
        length = min(most, -(-longest // _MULTIPLE) * _MULTIPLE) if flexible else most
        mine = range(first + dp.place * size, first + (dp.place + 1) * size)
        batches.append(_micro_batch(plan, windows, ends, mine, length))
    return batches


def _micro_batch(plan: Plan, windows: Windows, ends: I64, rows: range, length: int) -> MicroBatch:
    tokens_BS = torch.zeros((len(rows), length), dtype=torch.int64)
    labels_BS = torch.full((len(rows), length), IGNORED_LABEL)
    for place, row in enumerate(rows):
        if row >= len(ends):
            continue
        count, scored = windows.lengths_R2[row].tolist()
        tokens_T = torch.from_numpy(windows.tokens[ends[row] - count : ends[row]].copy())
        tokens_BS[place, : count - 1] = tokens_T[:-1]
        labels_BS[place, count - 1 - scored : count - 1] = tokens_T[count - scored :]
    documents_BL = torch.zeros((len(rows), length), dtype=torch.int32) if plan.data.attend == "document" else None
    return MicroBatch(tokens_BS, labels_BS, documents_BL, first=rows.start)


def _takes_short_rows(plan: Plan) -> bool:
    """Return whether all of a plan's layers take rows that are shorter than a sequence of the training."""
    mesh, layout = plan.layout.mesh, plan.layout
    alone = mesh.tp == mesh.pp == mesh.cp == 1 and layout.compile == "none"
    return alone and plan.module is None and plan.model.grid is None


def _result(fields: Mapping[str, Any]) -> TaskResult:
    metrics = {name: {key: _finite(number) for key, number in each.items()} for name, each in fields["metrics"].items()}
    return TaskResult.model_validate({"documents": fields["documents"], "metrics": metrics})


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _write(run_dir: Path, step: int, results: dict[str, TaskResult], requests: Sequence[Mapping[str, Any]]) -> None:
    """Replace the run's result, and the file of its requests."""
    result = EvaluationResult.of_tasks(step, results)
    lines = "".join(f"{json.dumps(request)}\n" for request in requests)
    for path, text in ((run_dir / REQUESTS_FILE, lines), (run_dir / EVALUATION_FILE, result.model_dump_json(indent=2))):
        new = path.with_name(f"{path.name}.new")
        new.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
        os.replace(new, path)
