"""Rank 0's side of the process of the tasks: starts it, hears what it asks, and ends it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from partool.plan.run import LOGS
from partool.plan.types import Plan
from partool.process import python_command
from partool_runtime.errors import ConfigurationError
from partool_runtime.frames import read_frame, write_frame
from partool_runtime.tasks.messages import TaskSettings, head_of

MODULE = "partool_runtime.tasks.process"
LOG = "tasks.log"


def settings_of(plan: Plan) -> TaskSettings:
    """Return what the process needs of a plan."""
    evaluation, data = plan.evaluation, plan.data
    return TaskSettings(
        tasks=tuple(evaluation.tasks),
        include_path=evaluation.include_path,
        limit=evaluation.limit,
        num_fewshot=evaluation.num_fewshot,
        tokenizer=data.tokenizer,
        special_tokens=tuple(data.special_tokens),
        sequence_length=plan.training.sequence_length,
    )


class TaskProcess:
    """The process; each side sends a frame and then waits for one of the other."""

    def __init__(self, plan: Plan, run_dir: Path) -> None:
        self._log = run_dir / LOGS / f"attempt-{os.environ.get('PARTOOL_ATTEMPT', '1')}" / LOG
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                python_command(MODULE),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                process_group=0,  # a stop of the ranks is no error of the tasks
            )
        self._input = cast("IO[bytes]", self._process.stdin)
        self._output = cast("IO[bytes]", self._process.stdout)
        self.send([settings_of(plan).to_json()])

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a frame. If the process has ended, :meth:`heard` says so, with which all ranks learn of it."""
        with suppress(OSError):
            write_frame(self._input, *parts)

    def heard(self, wait_s: float) -> list[bytes] | None:
        """Return the next frame; None if none begins within ``wait_s``.

        Raises ConfigurationError: that of the process, or PT641 if it has ended by itself.
        """
        if not select.select([self._output], [], [], wait_s)[0]:
            return None
        try:
            parts = read_frame(self._output)
        except EOFError:
            parts = []
        if not parts:
            raise self._ended()
        if (head := head_of(parts))["kind"] == "error":
            raise ConfigurationError(*head["error"])
        return parts

    def close(self) -> None:
        """End the process and what it has started."""
        for pipe in (self._input, self._output):
            with suppress(OSError):
                pipe.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ended(self) -> ConfigurationError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        message = f"the process of the tasks ended with exit code {self._process.returncode}"
        return ConfigurationError("PT641", message, f"see {self._log}")


def _environment() -> dict[str, str]:
    """Return the environment: without devices, and without the places of a rank, by which lm_eval counts ranks."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    devices = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return {**environment, **devices, "TOKENIZERS_PARALLELISM": "false"}
