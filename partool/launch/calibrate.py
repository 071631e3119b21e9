"""Starts a process in which the runtime measures this machine."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
from typing import Any

from partool.catalog.lookup import table
from partool.catalog.machine import available_cores, processor, this_machine
from partool.catalog.profile_file import MachineId, MeasuredFigures, Measurement, Profile, home
from partool.process import python_command
from partool.version import __version__

INTERRUPTED = 130


class MeasureError(Exception):
    """The measurement gave no result."""


def measure(sizes: str, ranks: int | None) -> Profile:
    """Measure this machine and return its profile; messages go to standard error. Raises MeasureError.

    An interrupt ends the measurement; the profile then holds the results so far, and its ``complete`` is False.
    """
    command = python_command("partool_runtime.calibrate", "--sizes", sizes, "--folder", str(home() / "runs"))
    command += [] if ranks is None else ["--ranks", str(ranks)]
    environment = os.environ | {"PARTOOL_LAUNCHER_PID": str(os.getpid())}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal also sends SIGINT to the measuring process
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        output, _ = process.communicate()
    finally:
        signal.signal(signal.SIGINT, before)
    if process.returncode not in (0, INTERRUPTED):
        raise MeasureError(f"the measuring process ended with exit code {process.returncode}")
    try:
        return _profile(json.loads(output))
    except ValueError as error:
        raise MeasureError(f"the measuring process gave no result: {str(error).splitlines()[0]}") from None


def empty_profile() -> Profile:
    """Return a profile of this machine without measurements, to hold only fitted scalars."""
    accelerator = this_machine().accelerator
    backend = table("accelerators").get(accelerator, {}).get("backend", "cpu" if accelerator == "cpu" else "")
    return Profile(
        partool_version=__version__, created=_now(), complete=True, sizes="none",
        machine=_machine({"backend": backend, "ranks": 1}, accelerator),
    )  # fmt: skip


def _profile(result: dict[str, Any]) -> Profile:
    machine_record = result["machine"]
    accelerator = "cpu" if machine_record.get("backend", "cpu") == "cpu" else this_machine().accelerator
    return Profile(
        partool_version=__version__,
        created=_now(),
        sizes=result["sizes"],
        complete=result["complete"],
        machine=_machine(machine_record, accelerator),
        figures=MeasuredFigures.model_validate(result["figures"]),
        measurements=tuple(Measurement.model_validate(line) for line in result["measurements"]),
    )


def _machine(record: dict[str, Any], accelerator: str) -> MachineId:
    return MachineId(
        accelerator=accelerator,
        processor=processor(),
        cores=available_cores(),
        devices=this_machine().devices,
        **record,
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
