"""Predicted against measured step times and memory on this machine's CPU, after calibration.

Calibrates, trains the specs of ``FIT`` with the measured figures, fits the scalars of these runs, and then predicts and
trains the specs of ``HELD_OUT``, which the fit has not seen. Each run's figures come from its row in
``measured_runs.csv``.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _record import write

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
QUIET = {
    "training.validation.every": 0, "training.validation.samples": 2, "checkpoint.every": 0, "training.log_every": 10,
}  # fmt: skip


def model(layers: int, hidden: int, ffn_hidden: int, heads: int, kv_heads: int, **more: object) -> dict[str, object]:
    """Return the fields of a model, over the quickstart's, and further settings with ``__`` for dots."""
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
    "quickstart, 4096 words": {"model.vocab": 4096},
    "quickstart, one rank, micro-batch 4": {"hardware.per_node": 1, "parallel.micro_batch": 4},
}


def partool(home: Path, *arguments: str) -> str:
    """Run a command in a store of its own; return what it printed."""
    done = subprocess.run(
        [BIN / "partool", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PARTOOL_HOME": str(home)},
    )
    if done.returncode:
        raise SystemExit(f"partool {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def trained(home: Path, name: str, settings: dict[str, object], steps: int) -> dict[str, object]:
    """Train a spec and return what its row says."""
    load = os.getloadavg()[0]
    sets = [f"--set={key}={value}" for key, value in ({"training.steps": steps} | QUIET | settings).items()]
    partool(home, "launch", "specs/quickstart.yaml", *sets)
    with (home / "measured_runs.csv").open(newline="", encoding="utf-8") as source:
        row = list(csv.DictReader(source))[-1]
    predicted, measured = float(row["predicted_step_time_s"]), float(row["step_time_s"])
    memory = float(row["predicted_memory_bytes"]), float(row["measured_memory_bytes"])
    found = {
        "spec": name, "predicted_s": predicted, "measured_s": measured, "error": round(predicted / measured - 1, 4),
        "memory_error": round(memory[0] / memory[1] - 1, 4), "zero": row["zero_or_fsdp"], "ranks": int(row["n_gpus"]),
        "recompute": row["recompute"], "micro_batch": int(row["micro_batch"]), "steps": int(row["steps"]),
        "load_before": round(load, 2),
    }  # fmt: skip
    print(
        f"{found['error']:+8.1%} {found['memory_error']:+8.1%}  {measured:.4f} s  {name}", file=sys.stderr, flush=True
    )
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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        calibration = partool(home, "calibrate", *["--quick"] * arguments.quick).splitlines()
        fit = [trained(home, spec, settings, arguments.steps) for spec, settings in FIT.items()]
        scalars = partool(home, "calibrate", "--from-runs").splitlines()[-2:]
        held_out = [trained(home, spec, settings, arguments.steps) for spec, settings in HELD_OUT.items()]
    result = {
        "calibration": calibration,
        "scalars": scalars,
        "fit": fit,
        "held_out": held_out,
        "step_time": errors(held_out, "error"),
        "memory": errors(held_out, "memory_error"),
    }
    write("calibrated", result, "torch", "partool")


if __name__ == "__main__":
    main()
