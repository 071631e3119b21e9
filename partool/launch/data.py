"""Starts the runtime's process that tokenises data or shows samples, and reads its answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any, Literal

from partool.process import python_command
from partool.spec.data import DataSpec

Event = dict[str, Any]


class DataProcessError(Exception):
    """The data cannot be read or tokenised; ``code`` and ``help`` are those of the ranks' error."""

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code = code
        self.help = help


def ask(action: Literal["prepare", "show"], data: DataSpec, length: int, rows: Sequence[int] = ()) -> list[Event]:
    """Return the process's answers: one per token cache, and for ``show`` one per row.

    ``data`` has absolute paths, ``length`` is that of a sequence, ``rows`` are the numbers of the rows to show. What
    the process says on the way goes to standard error. Raises DataProcessError.
    """
    request = {"action": action, "data": data.model_dump(mode="json"), "sequence_length": length, "rows": list(rows)}
    command = python_command("partool_runtime.tokens.process")
    ended = subprocess.run(command, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=False)
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    if events and events[-1]["event"] == "error":
        raise DataProcessError(events[-1]["code"], events[-1]["message"], events[-1]["help"])
    if ended.returncode:
        raise DataProcessError("PT602", f"the process that reads the data ended with exit code {ended.returncode}", "")
    return events
