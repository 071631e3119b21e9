"""Ranks of test_offload_kill.py: one is killed in the middle of its run, others then go on, and run unbroken."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import _trainer_worker
from _forks import run_forked


def killed(job: Path, checkpoints: Path) -> None:
    """Run a job and kill its process without a warning soon after it has written its second checkpoint."""
    if (pid := os.fork()) == 0:
        os._exit(run_forked(1, partial(_trainer_worker.main, str(job))))
    started_s = time.monotonic()
    while not any(checkpoints.glob("step-*[4-9]")):
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise RuntimeError("the run ended by itself")
        if time.monotonic() - started_s > 60:
            os.kill(pid, signal.SIGKILL)
            raise RuntimeError("no checkpoint was written")
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)  # its rank dies with it, by the same signal
    os.waitpid(pid, 0)


def main(folder: Path) -> int:
    """Make the runs; returns an exit code."""
    first, then = folder / "first.json", folder / "then.json"
    checkpoints = folder / "broken" / "checkpoints"
    killed(first, checkpoints)
    time.sleep(0.2)  # for the rank to be gone
    step = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*[0-9]"))
    (folder / "left.json").write_text(json.dumps([step, [path.suffix for path in (folder / "disk").iterdir()]]))
    jobs = json.loads(then.read_text())
    for job in jobs.values():
        job["plan"]["training"]["steps"] = step + 3
    then.write_text(json.dumps(jobs))
    return run_forked(1, partial(_trainer_worker.main, str(then)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
