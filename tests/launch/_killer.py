"""Runs the real ranks of a plan, kills one of them repeatedly, and resumes until the run is done.

Ranks are forked from this process, which has imported everything and started no threads, so an attempt starts fast.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

from partool.plan.types import Plan
from partool_runtime import worker
from partool_runtime.jobs.train import trainer  # noqa: F401

sys.path.append(str(Path(__file__).parents[1]))
from patience import PATIENCE
from ports import free_port

ATTEMPT_TIMEOUT_S = 60.0 * PATIENCE
GRACE_S = 3.0
"""Seconds for a rank to notice that another is gone; a rank that waits for it at start-up does not notice."""
STEP_S = 0.05
"""Approximate seconds of a step."""


class Attempt:
    """One start of all ranks."""

    def __init__(self, plan_file: Path, run_dir: Path, number: int, *, resume: bool) -> None:
        self.run_dir = run_dir
        self.number = number
        self.events = run_dir / "events" / "rank-0.jsonl"
        self.events_before = len(self.events.read_text()) if self.events.exists() else 0
        port = free_port()
        world_size = Plan.from_json(plan_file.read_text()).layout.mesh.world_size
        self.pids = [self._fork(rank, world_size, port, plan_file, resume) for rank in range(world_size)]
        self.codes: dict[int, int] = {}
        self.end_s = time.monotonic() + ATTEMPT_TIMEOUT_S

    def _fork(self, rank: int, world_size: int, port: int, plan_file: Path, resume: bool) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                PARTOOL_ATTEMPT=str(self.number),
            )
            log = os.open(self.run_dir / f"log-{self.number}-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = worker.main([str(plan_file), "--run-dir", str(self.run_dir), *["--resume"] * resume])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def running(self) -> bool:
        """Reap ranks that ended; return True as long as all run."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[rank] = os.waitstatus_to_exitcode(found[1])
        if time.monotonic() > self.end_s:
            self.signal(signal.SIGKILL)
            raise TimeoutError(f"attempt {self.number} hangs: {self.codes}")
        return not self.codes

    def signal(self, number: int) -> None:
        """Send a signal to every rank that has not been reaped."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, number)

    def finish(self) -> dict[int, int]:
        """Wait until every rank has ended and return the exit codes; like the agent, kill ranks that take too long."""
        left_s = float("inf")
        while len(self.codes) < len(self.pids):
            if not self.running():
                left_s = min(left_s, time.monotonic() + GRACE_S)
            if time.monotonic() > left_s:
                self.signal(signal.SIGKILL)
            time.sleep(0.002)
        return self.codes

    def writing(self) -> bool:
        """Return True while a checkpoint is being written."""
        return any((self.run_dir / "checkpoints").glob("*.tmp"))

    def step(self) -> int:
        """Return the newest step that this attempt has recorded."""
        text = self.events.read_text()[self.events_before :] if self.events.exists() else ""
        events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return max((event["data"]["step"] for event in events if event["kind"] == "step"), default=0)


def reaches(attempt: Attempt, step: float) -> bool:
    """Wait until a step is recorded; return False if the attempt ended before."""
    while attempt.step() < int(step):
        if not attempt.running():
            return False
        time.sleep(0.005)
    return attempt.running()


def kill_at(attempt: Attempt, rank: int, step: float) -> bool:
    """Kill a rank at a fractional step; return False if the run ended before."""
    if not reaches(attempt, step):
        return False
    time.sleep(step % 1 * STEP_S)
    if not attempt.running():
        return False
    os.kill(attempt.pids[rank], signal.SIGKILL)
    return True


def kill_in_write(attempt: Attempt, rank: int, step: float) -> bool:
    """Kill a rank inside a checkpoint write: freeze all ranks, check that the write is still in progress, then kill."""
    delay_s = step % 1 * STEP_S / 2
    alive = reaches(attempt, step)
    while alive and attempt.running():
        if not attempt.writing():
            continue
        time.sleep(delay_s)
        attempt.signal(signal.SIGSTOP)
        inside = attempt.writing()
        if inside:
            os.kill(attempt.pids[rank], signal.SIGKILL)
        attempt.signal(signal.SIGCONT)
        if inside:
            return True
        delay_s /= 2
    return False


def run_and_kill(plan_file: Path, run_dir: Path, kills: int, seed: int, *, resume: bool) -> dict[str, int]:
    """Kill ranks at ``kills`` seeded points, every other one inside a checkpoint write, then let the run end."""
    draw = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=resume)
    steps = Plan.from_json(plan_file.read_text()).training.steps
    points = sorted(draw.uniform(0, steps - 4) for _ in range(kills))
    counts = {"kills": 0, "in_write": 0, "attempts": 0}
    while True:
        counts["attempts"] += 1
        attempt = Attempt(plan_file, run_dir, counts["attempts"], resume=resume or counts["attempts"] > 1)
        if counts["kills"] < kills:
            inside = counts["kills"] % 2 == 1
            rank = draw.randrange(len(attempt.pids))
            killed = (kill_in_write if inside else kill_at)(attempt, rank, points[counts["kills"]])
            counts["kills"] += killed
            counts["in_write"] += killed and inside
        codes = attempt.finish()
        if set(codes.values()) == {0}:
            return counts
        if -signal.SIGKILL not in codes.values():
            raise RuntimeError(f"attempt {attempt.number} ended with {codes}: see {run_dir}")


def main() -> None:
    """Run the cases given as JSON: plan file → run folder, number of kills, seed."""
    gc.freeze()  # looking for garbage in what ranks share would copy it to each of them
    for case in json.loads(sys.argv[1]):
        started_s = time.monotonic()
        counts = run_and_kill(
            Path(case["plan"]), Path(case["run_dir"]), case["kills"], case["seed"], resume=case["resume"]
        )
        counts["seconds"] = round(time.monotonic() - started_s, 1)
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
