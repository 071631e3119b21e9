"""A run on disk and as processes: names in its folder, its status, environment and command lines.

Launcher and agent share this module, so that ``--dry-run`` prints exactly the commands that run.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from partool.catalog.machine import available_cores
from partool.plan.progress import LoggedStep
from partool.plan.record import Record, UnixTime
from partool.plan.types import Plan
from partool.process import python_command

SPEC_FILE = "spec.yaml"
PLAN_FILE = "plan.json"
STATUS_FILE = "status.json"
LOCK_FILE = "agent.lock"
KEY_FILE = "agents.key"
KEY_VARIABLE = "PARTOOL_AGENT_KEY"
"""Environment variable with the key that agents of several nodes use to sign their messages. The variable takes
precedence over a key in a file."""
CANCEL_FILE = "cancel"
"""Name of a file in the run's folder; if the file exists, a scheduler's script does not restart the run."""
PREEMPTIONS_FILE = "preemptions.count"
FAILURES_FILE = "failures.count"
"""Name of the file with the number of times that the Slurm script has requeued the job, and the reasons."""
RESTARTS_FILE = "restarts.count"
"""Name of the file with the id of a Slurm job, and with how many of its restarts the job's script has counted."""
_THREADS = "OMP_NUM_THREADS"
LOGS = "logs"
ERRORS = "errors"

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|lost another rank|remote (process|peer)|socket timeout"
    r"|timed out (waiting|after)|communicator (was|is) aborted|NCCL (timeout|error)|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
"""Matches error messages of torch, gloo, NCCL and RCCL about a lost connection to another rank."""

State = Literal["queued", "starting", "running", "done", "preempted", "failed", "cancelled", "unknown"]
"""States of a run. A ``queued`` run waits for a scheduler; a run is ``unknown`` if its machine cannot be asked."""


class RunStatus(Record):
    """Content of ``status.json``; the launcher writes the first version, the agent all others."""

    state: State
    created: UnixTime
    """Unix time at which the run's folder was made."""
    attempt: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Number of times the ranks were started, over restarts and resumes; the current attempt counts while the ranks
    run."""
    pid: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Process id of the agent (of the launcher while starting)."""
    process_start: str = ""
    """Start time of the process ``pid``, from :func:`process_start`; it distinguishes a recycled pid."""
    host: str = ""
    started: UnixTime | None = None
    """Unix time at which the latest agent began."""
    ended: UnixTime | None = None
    exit_code: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    reason: str = ""
    """Reason why the run ended, in one line."""
    logged_step: LoggedStep | None = Field(default=None, exclude=True)
    """Last step, as a target found it in the log of a run that it runs elsewhere; not in the file."""
    unknown_step: str = Field(default="", exclude=True)
    """Reason why such a target does not know the last step; empty if it does, and not in the file."""

    @property
    def active(self) -> bool:
        """True while the run is expected to continue by itself."""
        return self.state in ("queued", "starting", "running", "unknown")


def lost_peer(message: str) -> bool:
    """Return True for the error message of a rank that noticed the end of another rank."""
    return _LOST_PEER.search(message) is not None


def write_status(run_dir: Path, status: RunStatus) -> None:
    """Replace the run's status; a reader sees the old or the new status, never a mixture.

    If the disk has no room for another file, the old file is overwritten in the disk block that it occupies. Raises
    OSError.
    """
    file, temporary = run_dir / STATUS_FILE, run_dir / f".{STATUS_FILE}.{os.getpid()}"
    text = status.model_dump_json(indent=2) + "\n"
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not file.exists():
            raise
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        with file.open("r+b") as stream:
            stream.write(text.encode())
            stream.truncate()


def read_status(run_dir: Path) -> RunStatus:
    """Return the status as written; raises ``FileNotFoundError`` or ``pydantic.ValidationError``."""
    return RunStatus.model_validate_json((run_dir / STATUS_FILE).read_text(encoding="utf-8"))


def this_process() -> dict[str, int | str]:
    """Return the fields of :class:`RunStatus` that identify the calling process, as name → value."""
    return {"pid": os.getpid(), "process_start": process_start(os.getpid()) or "", "host": socket.gethostname()}


def process_start(pid: int) -> str | None:
    """Return the start time of a process of this host, in the system's notation; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _process_start_from_ps(pid)
    except ProcessLookupError:
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the command's name may itself contain blanks and brackets
    return None if state in "ZX" else rest[18]  # field 22 of proc(5): start time in clock ticks since boot


def _process_start_from_ps(pid: int) -> str | None:
    answer = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def rank_log(run_dir: Path, attempt: int, rank: int, stream: Literal["stdout", "stderr"]) -> Path:
    """Return the path of a rank's output file in one attempt; ``attempt`` is as in the status, ``rank`` from 0."""
    return run_dir / LOGS / f"attempt-{attempt}" / f"rank-{rank}.{stream}.log"


def starting_file(run_dir: Path, attempt: int, rank: int) -> Path:
    """Return the path of the file that exists until a rank's first step is about to end.

    While the file exists, the rank has nothing to save.
    """
    return run_dir / LOGS / f"attempt-{attempt}" / f"rank-{rank}.starting"


def agent_log(run_dir: Path, attempt: int) -> Path:
    """Return the path of the file in which the agent records why it started an attempt after the first."""
    return run_dir / LOGS / f"attempt-{attempt}" / "agent.log"


def lock_file(node_rank: int) -> str:
    """Return the name of the lock file that a node's agent holds in the run's folder; nodes may share the folder."""
    return LOCK_FILE if node_rank == 0 else f"agent-{node_rank}.lock"


def agent_command(
    python: str | None,
    plan_file: Path,
    run_dir: Path,
    *,
    resume: bool,
    plan_hash: str | None = None,
    nodes: int | None = None,
    node_rank: int | str | None = None,
    rendezvous: str | None = None,
    echo: Literal["rank0", "all", "none"] | None = None,
    termination_log: str | None = None,
) -> list[str]:
    """Return the command line of the agent of one node; without ``python``, with this process's interpreter.

    ``nodes``, ``node_rank`` (a number, or a placeholder that a scheduler replaces) and ``rendezvous`` (``HOST:PORT``)
    belong together; one node needs none of them.
    """
    options = {
        "--plan-hash": plan_hash,
        "--nodes": nodes,
        "--node-rank": node_rank,
        "--rendezvous": rendezvous,
        "--echo": echo,
        "--termination-log": termination_log,
    }
    more = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    return _command(python, "partool_runtime.agent", plan_file, run_dir, resume) + more


def rank_command(plan_file: Path, run_dir: Path, *, resume: bool, module: str) -> list[str]:
    """Return the command line that starts a rank; it is equal for all ranks."""
    return _command(None, module, plan_file, run_dir, resume)


def _command(python: str | None, module: str, plan_file: Path, run_dir: Path, resume: bool) -> list[str]:
    command = python_command(module, str(plan_file), "--run-dir", str(run_dir), python=python)
    return command + ["--resume"] * resume


def rank_environment(plan: Plan) -> dict[str, str]:
    """Return name → value of the variables that every rank gets in addition to the agent's environment.

    partool's defaults come first, then the plan's environment, then ``launch.env``; the last value wins. Secrets are
    not included.
    """
    environment = {"PYTHONUNBUFFERED": "1"}
    if plan.devices.threads_per_rank or _THREADS not in os.environ:
        environment[_THREADS] = str(rank_threads(plan))
    if plan.devices.nodes == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        # A host name that does not resolve would otherwise stop gloo on machines without a network.
        loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        environment.update({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})
    # The plan names the threads for renderers; this process may have fewer cores than the plan counts with.
    planned = {each.name: each.value for each in plan.environment if each.name != _THREADS}
    return environment | planned | plan.launch.env


def rank_threads(plan: Plan) -> int:
    """Return the number of OpenMP threads of a rank: the plan's, within the cores that this process may use."""
    most = max(1, available_cores() // plan.devices.per_node)
    return min(plan.devices.threads_per_rank or most, most)
