"""Predicted against measured step times and memory on this machine's CPU, after calibration.

Calibrates, trains the specs of ``FIT`` with the measured figures, fits the scalars of these runs, and then predicts and
trains the specs of ``HELD_OUT``, which the fit has not seen. Each run's figures come from its row in
``measured_runs.csv``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from _record import write

from partool.plan.run_rows import RUNS_FILE, append_row, read_rows, term_column
from partool.plan.terms import TIME_TERMS

T = TypeVar("T")
LOUD = 0.15
"""Number of cores busy with other processes above which a measurement is repeated."""

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
QUIET = {
    "training.validation.every": 0, "training.validation.samples": 2, "checkpoint.every": 0, "training.log_every": 10,
}  # fmt: skip


def model(layers: int, hidden: int, ffn_hidden: int, heads: int, kv_heads: int, **more: object) -> dict[str, object]:
    """Return a model's fields that override the quickstart's, and further settings with ``__`` for dots."""
    fields = {"layers": layers, "hidden": hidden, "ffn_hidden": ffn_hidden, "heads": heads, "kv_heads": kv_heads}
    return {f"model.{name}": value for name, value in fields.items()} | {
        name.replace("__", "."): value for name, value in more.items()
    }


FIT: dict[str, dict[str, object]] = {
    "quickstart": {},
    "one rank, 6 layers of 256": model(6, 256, 704, 4, 4, hardware__per_node=1),
    "ZeRO-3, 4 layers of 384, short": model(
        4, 384, 1024, 6, 6, parallel__data__zero=3, training__sequence_length=128, training__global_batch=16
    ),
}
HELD_OUT: dict[str, dict[str, object]] = {
    "ZeRO-1, 5 layers of 320": model(5, 320, 864, 5, 5, parallel__data__zero=1),
    "ZeRO-3, 8 layers of 256, batch 32": model(8, 256, 704, 8, 4, parallel__data__zero=3, training__global_batch=32),
    "one rank, 4 layers of 512": model(4, 512, 1408, 8, 8, hardware__per_node=1, training__global_batch=8),
    "quickstart, all recomputed, ZeRO-2": {"parallel.recompute": "full", "parallel.data.zero": 2},
    "quickstart, ZeRO-0": {"parallel.data.zero": 0},
    "quickstart, 4096 words": {"model.vocab": 4096},
    "quickstart, one rank, micro-batch 4": {"hardware.per_node": 1, "parallel.micro_batch": 4},
    "ZeRO-2, 6 layers of 384, batch 8": model(6, 384, 1024, 6, 6, parallel__data__zero=2, training__global_batch=8),
}


def partool(home: Path, *arguments: str) -> str:
    """Run a partool command in a separate store; return its output."""
    environment = os.environ | {"PARTOOL_HOME": str(home)}
    done = subprocess.run([BIN / "partool", *arguments], cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"partool {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


class Others:
    """Number of cores that other processes keep busy, from the start of the measurement to its end."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        busy = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        own = os.times()
        ticks = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), (sum(busy) - busy[3] - busy[4]) / ticks, sum(own[:4])

    @property
    def cores(self) -> float:
        """Busy seconds of other processes than this one and its children, per second."""
        seconds, busy, own = (now - start for now, start in zip(self._now(), self._start, strict=True))
        return round(max(0.0, busy - own) / seconds, 2)


def quietly(measure: Callable[[], T], patience_s: float) -> tuple[T, float]:
    """Measure, and repeat a limited number of times while other processes are busy; return the cores they took."""
    end = time.monotonic() + patience_s
    while True:
        before = Others()
        time.sleep(2.0)
        if before.cores > LOUD and time.monotonic() < end:
            continue
        others = Others()
        found = measure()
        if (cores := others.cores) <= LOUD or time.monotonic() > end:
            return found, cores
        print(f"again: other processes took {cores:g} cores", file=sys.stderr, flush=True)


def trained(home: Path, name: str, settings: dict[str, object], steps: int, patience_s: float) -> dict[str, object]:
    """Train a spec, keep its row in the store, and return that row's figures."""
    sets = [f"--set={key}={value}" for key, value in ({"training.steps": steps} | QUIET | settings).items()]

    def measure() -> dict[str, str]:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(home / "calibration.json", folder)
            partool(Path(folder), "launch", "specs/quickstart.yaml", *sets)
            return read_rows(Path(folder) / RUNS_FILE)[-1]

    row, cores = quietly(measure, patience_s)
    append_row(home / RUNS_FILE, row)
    predicted, measured = float(row["predicted_step_time_s"]), float(row["step_time_s"])
    memory = float(row["predicted_memory_bytes"]), float(row["measured_memory_bytes"])
    found = {
        "spec": name, "predicted_s": predicted, "measured_s": measured, "error": round(predicted / measured - 1, 4),
        "memory_error": round(memory[0] / memory[1] - 1, 4), "zero": row["zero_or_fsdp"], "ranks": int(row["n_gpus"]),
        "recompute": row["recompute"], "micro_batch": int(row["micro_batch"]), "steps": int(row["steps"]),
        "others_cores": cores,
        "terms_s": {
            term: [float(row[term_column(what, "time", term)] or 0) for what in ("predicted", "measured")]
            for term in TIME_TERMS if row[term_column("measured", "time", term)]
        },
    }  # fmt: skip
    print(json.dumps(found["terms_s"]), file=sys.stderr)
    print(f"{found['error']:+8.1%} {found['memory_error']:+8.1%}  {measured:.4f} s  others {cores}  {name}",
          file=sys.stderr, flush=True)  # fmt: skip
    return found


def errors(rows: list[dict[str, object]], key: str) -> dict[str, float]:
    """Return median and largest absolute error."""
    values = [abs(float(str(row[key]))) for row in rows]
    return {"median": round(statistics.median(values), 4), "largest": max(values)}


def main() -> None:
    """Calibrate, fit, predict, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="the quick calibration")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for a quiet machine, each time")
    arguments = parser.parse_args()
    steps, patience_s = arguments.steps, arguments.patience
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        answer, others = quietly(lambda: partool(home, "calibrate", *["--quick"] * arguments.quick), patience_s)
        print(answer, file=sys.stderr, flush=True)
        fit = [trained(home, spec, settings, steps, patience_s) for spec, settings in FIT.items()]
        scalars = partool(home, "calibrate", "--from-runs").splitlines()[-2:]
        print("\n".join(scalars), file=sys.stderr, flush=True)
        held_out = [trained(home, spec, settings, steps, patience_s) for spec, settings in HELD_OUT.items()]
    result = {
        "calibration": answer.splitlines(),
        "calibration_others_cores": others,
        "scalars": scalars,
        "fit": fit,
        "held_out": held_out,
        "step_time": errors(held_out, "error"),
        "memory": errors(held_out, "memory_error"),
    }
    write("calibrated", result, "torch", "partool")


if __name__ == "__main__":
    main()
