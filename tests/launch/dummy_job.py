"""A rank without a model: counts steps and follows ``script.json`` in its run folder.

The script maps ``"rank"`` or ``"rank@attempt"`` to one of: ``raise`` (a ValueError at step 3), ``configuration``,
``kill`` (SIGKILL to itself at step 3), ``hang`` (never looks at the stop request again), ``follow`` (run until told
to stop), ``slow`` (a minute before its first step), ``linger`` (a checkpoint when told to stop, but no exit),
``long`` (a checkpoint after step 3, a fourth step of 4 s, then follow), ``signal:NAME`` (send itself a signal at step
3, then follow), ``exit:N`` (os._exit), ``freeze`` (SIGSTOP to itself at step 3), ``deaf`` (no further progress from
step 6 on), ``wait`` (the same from step 7 on, as a rank that waits for one of those), ``late`` (five steps, and then no
end). Without an entry a rank does five steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from partool.plan.types import Plan
from partool_runtime import worker
from partool_runtime.errors import ConfigurationError, Preempted
from partool_runtime.pulse import Pulse
from partool_runtime.stop import StopRequest

STEP_S = 0.02


def run(plan: Plan, run_dir: Path, resume: bool, stop: StopRequest, pulse: Pulse) -> None:
    """Run the scripted job."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["PARTOOL_ATTEMPT"])
    script: dict[str, str] = json.loads((run_dir / "script.json").read_text())
    order = script.get(f"{rank}@{attempt}", script.get(str(rank), ""))
    (run_dir / f"start-{rank}-{attempt}.json").write_text(
        json.dumps(
            {"pid": os.getpid(), "resume": resume, "env": dict(os.environ), "cores": sorted(os.sched_getaffinity(0))}
        )
    )
    print(f"rank {rank} attempt {attempt} begins", flush=True)
    pulse.enter("training")
    endless = ("follow", "hang", "linger", "deaf", "wait", "long")
    steps = 10**6 if order in endless or order.startswith("signal:") else 5
    for step in range(1, steps + 1):
        time.sleep(_step_s(order, step))
        stop.begin()
        if step == 3:
            _misbehave(order, rank)
        if (order, step) in (("deaf", 6), ("wait", 7)):
            _wait()
        if step == 3 and order == "long":
            (run_dir / "checkpoints" / "step-00000003").mkdir(parents=True, exist_ok=True)
        (run_dir / f"steps-{rank}").write_text(str(step))
        pulse.stepped(step)
        if order != "hang" and _any_stopped(run_dir, stop):
            (run_dir / f"checkpoint-{rank}").write_text(f"{step} {stop.reason}")
            if order == "linger":
                (run_dir / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
                time.sleep(600)
            raise Preempted
    if order == "late":
        pulse.enter("ending")
        _wait()
    print(f"rank {rank} attempt {attempt} done", flush=True)


def _step_s(order: str, step: int) -> float:
    if order == "slow":
        return 60.0
    return 4.0 if order == "long" and step == 4 else STEP_S


def _misbehave(order: str, rank: int) -> None:
    if order == "raise":
        raise ValueError(f"broken on purpose by rank {rank}")
    if order == "configuration":
        raise ConfigurationError("PT699", "the file is not there", "write it")
    if order == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
        _wait()
    if order == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if order.startswith("exit:"):
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os._exit(int(order[5:]))
    if order.startswith("signal:"):
        os.kill(os.getpid(), getattr(signal, order[7:]))


def _wait() -> None:
    """Make no progress any more."""
    time.sleep(600)


def _any_stopped(run_dir: Path, stop: StopRequest) -> bool:
    """Stand-in for the all-reduce of the stop flag."""
    if stop.requested:
        (run_dir / "stopping").touch()
    return (run_dir / "stopping").exists()


if __name__ == "__main__":
    worker.load_job = lambda name: run  # type: ignore[assignment]
    sys.exit(worker.main())
