"""What trackers cost: microseconds of the training thread per step, and seconds of processors of a whole run.

A run is rank 0's recorder over steps of ``STEP_S`` that sleep, every one a log step, the most that a tracker can be
given. ``PARTOOL_TRACKERS``/NAME has the packages (``make trackers``). ``stuck`` is W&B with a server that accepts and
never answers. The processes of trackers are counted apart: on a machine without idle cores they take time from ranks.

    python tests/bench/trackers.py [--runs 5] [--steps 100]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path
from typing import Any

STEP_S = 0.1
ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("PARTOOL_TRACKERS", ROOT / "build" / "trackers"))
CASES = ("none", "tensorboard", "wandb", "mlflow", "trackio", "stuck")


def one_run(case: str, steps: int, folder: Path) -> dict[str, Any]:
    """Run in this process; return seconds of ``step`` calls and of processors."""
    import torch
    from _telemetry import small_plan
    from rich.console import Console

    from partool.spec.telemetry import TelemetrySpec, TrackerSpec
    from partool_runtime.telemetry import Recorder
    from partool_runtime.telemetry._console import ConsoleLines

    trackers = [] if case == "none" else [TrackerSpec(name="wandb" if case == "stuck" else case)]
    plan = small_plan(steps=steps, log_every=1, telemetry=TelemetrySpec(trackers=trackers))
    began, calls, calls_cpu = time.perf_counter(), list[float](), list[float]()
    recorder = Recorder(
        plan,
        folder,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        display=ConsoleLines(steps, Console(file=StringIO(), width=100)),
    )
    opened = time.perf_counter()
    recorder.event("start", attempt=1, world_size=1, plan_hash="", resumed_from=0)
    for step in range(1, steps + 1):
        time.sleep(STEP_S)
        at, used = time.perf_counter(), time.thread_time()
        recorder.step(step, 1.0 / step, 0.5, 1e-3)
        calls.append(time.perf_counter() - at)
        calls_cpu.append(time.thread_time() - used)
    closing = time.perf_counter()
    recorder.close()
    mine, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "calls_s": calls[2:],
        "calls_cpu_s": calls_cpu[2:],
        "open_s": opened - began,
        "close_s": time.perf_counter() - closing,
        "rank_cpu_s": mine.ru_utime + mine.ru_stime,
        "trackers_cpu_s": theirs.ru_utime + theirs.ru_stime,
    }


def measured(case: str, steps: int) -> dict[str, Any]:
    """Run a case in a new process."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as silent:
        run_dir = Path(folder) / "runs" / "bench"
        name = "wandb" if case == "stuck" else case
        paths = [FOLDER / name, ROOT / "tests", ROOT / "tests" / "unit"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TRACKIO_DIR": str(run_dir / "trackio"),
            "WANDB_API_KEY": "0" * 40,
            "WANDB_MODE": "online" if case == "stuck" else "offline",
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        command = [sys.executable, __file__, "--case", case, "--steps", str(steps), "--folder", str(run_dir)]
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def percentiles(runs: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Return the median and the 99th percentile of the calls of all runs, in microseconds."""
    calls_us = sorted(1e6 * call for run in runs for call in run[name])
    return {"median": round(statistics.median(calls_us), 1), "p99": round(calls_us[int(0.99 * (len(calls_us) - 1))], 1)}


def summary(case: str, runs: list[dict[str, Any]], bare: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a case over its runs; what is added to a step is taken from the thread's processor time."""
    used = percentiles(runs, "calls_cpu_s")
    return {
        "case": case,
        "runs": len(runs),
        "step_us": percentiles(runs, "calls_s"),
        "step_cpu_us": used,
        "added_share_of_step": {name: round((used[name] - bare[name]) / 1e6 / STEP_S, 6) for name in used},
        **{
            name: [round(run[name], 3) for run in runs]
            for name in ("open_s", "close_s", "rank_cpu_s", "trackers_cpu_s")
        },
    }


def main() -> None:
    """Alternate the cases, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--case")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(one_run(given.case, given.steps, given.folder)))
        return
    from _record import write

    load = os.getloadavg()
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(given.runs):
        for case in CASES:
            runs[case].append(measured(case, given.steps))
    bare = percentiles(runs["none"], "calls_cpu_s")
    rows = [summary(case, runs[case], bare) for case in CASES]
    write("trackers", {"steps": given.steps, "step_s": STEP_S, "load": [load, os.getloadavg()], "rows": rows}, "torch")


if __name__ == "__main__":
    main()
