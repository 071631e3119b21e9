"""Runs Slurm's commands with a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from partool.launch.slurm.text import ACCOUNTING, COLUMNS, SlurmJob, last_words, parse_accounting, parse_queue
from partool.launch.target import LaunchError
from partool.plan.posix import user_id

ANSWER_TIMEOUT_S = 60.0
"""Seconds to wait for an answer, enough for a busy controller."""
_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Connection refused",
    "Connection timed out",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Protocol authentication error",
    "Unexpected message received",
    "Munge",
    "Slurm backup controller in standby mode",
)


class CommandAnswer(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Slurm:
    """A Slurm cluster: the cluster that this machine's Slurm commands address by default, or another cluster."""

    def __init__(self, cluster: str = "") -> None:
        self.cluster = cluster
        self._cluster = [f"--clusters={cluster}"] if cluster else []

    def jobs(self, ids: Sequence[str]) -> list[SlurmJob]:
        """Return the jobs with these ids that the controller knows, even ended jobs; each array task is one job."""
        return self._queue(f"--jobs={','.join(ids)}") if ids else []

    def named(self, name: str) -> list[SlurmJob]:
        """Return this user's jobs with the name ``name``."""
        # --me does not exist before 20.02; the numeric user id works without a name service
        return [job for job in self._queue(f"--name={name}", f"--user={user_id()}") if job.name == name]

    def recorded(self, ids: Sequence[str]) -> list[SlurmJob]:
        """Return accounting's records of jobs that the controller has forgotten; empty without accounting."""
        if not ids or shutil.which("sacct") is None:
            return []
        fields = ",".join(ACCOUNTING)
        options = ["--noheader", "--parsable2", "--allocations", f"--format={fields}", f"--jobs={','.join(ids)}"]
        try:
            answer = call(["sacct", *self._cluster, *options])
        except LaunchError:  # the controller has answered, so a database that is down is no error
            return []
        return parse_accounting(answer.out) if answer.code == 0 else []

    def cancel(self, ids: Sequence[str], *options: str) -> str:
        """Run scancel; returns its error message, or an empty text if it prints no error."""
        answer = call(["scancel", *self._cluster, *options, *ids])
        return "" if answer.code == 0 else answer.err.strip()

    def cancel_named(self, name: str) -> None:
        """Cancel this user's jobs with the name ``name``, if there are any."""
        call(["scancel", *self._cluster, f"--name={name}", f"--user={user_id()}"])

    def _queue(self, *which: str) -> list[SlurmJob]:
        columns = ",".join(f"{name}:{width}" for name, width in COLUMNS)
        command = ["squeue", *self._cluster, "--noheader", "--array", "--states=all", f"--Format={columns}", *which]
        answer = call(command)
        if answer.code and "Invalid job id" not in answer.err:  # squeue's error for a single unknown id
            raise _failed(command, answer)
        return parse_queue(answer.out)


def call(
    command: Sequence[str], text: str | None = None, environment: dict[str, str] | None = None, timeout_s: float = 0
) -> CommandAnswer:
    """Run one of Slurm's commands, and return its exit code and output.

    Raises LaunchError PT550 if the command is not installed, does not answer in time, or cannot reach the controller.
    """
    wait_s = timeout_s or ANSWER_TIMEOUT_S
    # The user's settings for time formats and colours, and squeue's variables, would change the output.
    env = {name: value for name, value in (environment or dict(os.environ)).items() if not _changes_output(name)}
    if command[0] != "sbatch":  # sbatch passes its environment on to the job
        env |= {"SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        process = subprocess.run(
            command, input=text, env=env, capture_output=True,
            text=True, errors="replace", timeout=wait_s, check=False,
            stdin=subprocess.DEVNULL if text is None else None,
        )  # fmt: skip
    except FileNotFoundError:
        raise _missing(command[0]) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            "PT550", f"{command[0]} has not answered for {wait_s:g} s", "scontrol ping says how Slurm is", exit_code=3
        ) from None
    answer = CommandAnswer(process.returncode, process.stdout, process.stderr)
    if answer.code and any(sign in answer.err for sign in _UNREACHABLE):
        raise _failed(command, answer)
    return answer


def missing_command(command: str) -> None:
    """Raise LaunchError PT550 if a command is not installed."""
    if shutil.which(command) is None:
        raise _missing(command)


def _missing(command: str) -> LaunchError:
    help = "launch on a login node of the cluster, or load its Slurm module; partool render needs neither"
    return LaunchError("PT550", f"{command} is not in PATH: this machine cannot submit to Slurm", help, exit_code=3)


def _failed(command: Sequence[str], answer: CommandAnswer) -> LaunchError:
    """Return the error that reports the unexpected failure of a command."""
    said = last_words(answer.err) or f"exit code {answer.code}"
    return LaunchError("PT550", f"{command[0]}: {said}", "scontrol ping says whether Slurm is up", exit_code=3)


def _changes_output(name: str) -> bool:
    return name.startswith(("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")) or name in (
        "SLURM_TIME_FORMAT",
        "SLURM_CLUSTERS",
    )
