"""The records in ``errors/`` of what ended ranks; ranks write them, and the agent for ranks that could not."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from partool.plan.run import ERRORS
from partool_runtime.errors import ConfigurationError, exit_code


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The error that ended a rank."""

    rank: int
    attempt: int
    time: float
    """Unix time at which the rank caught the error, or was last seen alive."""
    type: str
    """Name of the exception; empty for a rank that died without raising one, as by a signal."""
    message: str
    traceback: str
    exit_code: int
    code: str = ""
    """Rule code of a configuration error."""
    help: str = ""


def write_error(run_dir: Path, rank: int, attempt: int, error: BaseException) -> ErrorRecord:
    """Record an error of this rank as ``errors/rank-N.json``, in place of the record of an earlier attempt."""
    configuration = error if isinstance(error, ConfigurationError) else None
    record = ErrorRecord(
        rank=rank,
        attempt=attempt,
        time=time.time(),
        type=type(error).__qualname__,
        message=configuration.message if configuration else str(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=exit_code(error),
        code=configuration.code if configuration else "",
        help=configuration.help if configuration else "",
    )
    put_record(run_dir, record)
    return record


def put_record(run_dir: Path, record: ErrorRecord) -> None:
    """Write a record, in place of the record of an earlier attempt; raises OSError."""
    folder = run_dir / ERRORS
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".rank-{record.rank}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / f"rank-{record.rank}.json")


def read_errors(run_dir: Path, attempt: int) -> dict[int, ErrorRecord]:
    """Return the records of an attempt by rank."""
    records = [ErrorRecord(**json.loads(file.read_text("utf-8"))) for file in (run_dir / ERRORS).glob("rank-*.json")]
    return {record.rank: record for record in records if record.attempt == attempt}
