"""The kernels on one GPU, in under nine minutes: correctness, speed, and the best configurations.

Parts run one after the other, each in its own process with a time limit, so a part that crashes or hangs costs only its
own results. At the end the tuner fills ``tuned/`` for this device in the remaining time. ``--dry`` tries everything on
a host, with Triton's interpreter at tiny sizes; its figures mean nothing and are not kept.

Without a GPU the script says so and exits with code 2; if a result is wrong, with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "kernels" / "partool_kernels" / "tuned"
WHOLE_S = 525.0
GRACE_S = 15.0
"""Seconds that a part may exceed its limit to finish its current measurement before it is killed."""
PARTS = {"checks": 110.0, "speeds": 70.0, "together": 40.0, "steps": 290.0}
"""Seconds of each part, process start included; a run of the trainer writes a checkpoint of 15 GB at its end."""
LEAST_TUNING_S = 20.0


def run_part(name: str, dry: bool, seconds: float) -> dict[str, Any]:
    """Run a part in this process and return its results."""
    import torch
    from _kernels_alone import check, huge, speeds
    from _kernels_clock import clock
    from _kernels_edges import edges
    from _kernels_run import Run
    from _kernels_step import whole_steps
    from _kernels_together import PEERS

    from partool_kernels.device import architecture

    until_s = time.monotonic() + seconds
    here = clock(dry)
    kind = "sm_90" if dry else architecture(here.device)
    if kind is None:
        sys.exit(f"no kernels are compiled for {torch.cuda.get_device_name()}")
    run = Run(here, kind, dry, until_s)

    def together() -> dict[str, Any]:
        return {name: run.attempt(name, lambda measure=measure: measure(run)) for name, measure in PEERS.items()}

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "checks": lambda: {"edges": edges(run)} | check(run) | {"huge": run.attempt("huge", lambda: huge(run))},
        "speeds": lambda: speeds(run),
        "together": together,
        "steps": lambda: whole_steps(run),
    }
    start_s = time.monotonic()
    found = parts[name]()
    return found | {"left_out": run.left_out, "seconds": round(time.monotonic() - start_s, 1)}


def in_process(command: list[str], seconds: float, **own: str) -> tuple[int | None, str]:
    """Run a command; return its exit code, None if it was killed for time, and the last line of its errors."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=os.environ | own, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Kill its children too: a launch starts ranks.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return code, lines[-1] if lines else ""


def one(name: str, dry: bool, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own."""
    print(f"{name}: at most {seconds:.0f} s", flush=True)
    # Ranks of whole steps select kernels themselves, and compile.
    own = {"TRITON_INTERPRET": "1"} if dry and name != "steps" else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--part", name, "--seconds", str(seconds), "--out", str(path)]
        code, error = in_process(command + ["--dry"] * dry, seconds + GRACE_S, **own)
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
    return {"failed": "ended: it took too long" if code is None else f"exit code {code}: {error}"}


def tune(dry: bool, seconds: float) -> dict[str, Any]:
    """Fill the tuning tables for this device."""
    print(f"tuning: at most {seconds:.0f} s", flush=True)
    before = _entries()
    command = [sys.executable, "-m", "partool_runtime.tune", "--examples", "--out", str(TABLES)]
    code, error = in_process([*command, "--budget", str(seconds)] + ["--dry-run"] * dry, seconds + GRACE_S)
    after = _entries()
    changed = sorted(str(path.relative_to(TABLES)) for path, text in after.items() if before.get(path) != text)
    return {"exit_code": code, "budget_s": round(seconds), "changed_tables": changed} | (
        {"error": error} if code else {}
    )


def _entries() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in TABLES.glob("*/*.json")}


def machine(dry: bool) -> dict[str, str]:
    """Return the device and the versions that the figures were measured with."""
    import torch
    import triton

    if dry:
        return {"gpu": "none, a dry run"}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "driver": driver,
        "triton": triton.__version__,
    }


def unmet(found: object, where: str = "") -> list[str]:
    """Return the paths in a result of the goals that were missed."""
    if not isinstance(found, dict):
        return []
    missed = [where] if found.get("met") is False else []
    return missed + [
        each for name, part in found.items() for each in unmet(part, f"{where}: {name}" if where else name)
    ]


def faults(result: dict[str, Any]) -> list[str]:
    """Return the correctness faults in a result, as opposed to missed speed goals."""
    checks = result["checks"]
    found = [*checks.get("wrong", []), *checks.get("edges", {}).get("wrong", [])]
    found += [f"checks: {checks['failed']}"] if "failed" in checks else []
    found += [f"huge {name}: other bits" for name, equal in (checks.get("huge") or {}).items() if not equal]
    apart = result["steps"].get("losses_apart")
    return found + ([f"losses apart by {apart['relative']:.2g}"] if apart and not apart["met"] else [])


def main() -> None:
    """Run all parts, or one of them in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on a host, to try the script itself")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        found = run_part(asked.part, asked.dry, asked.seconds)
        asked.out.write_text(json.dumps(found), encoding="utf-8")
        return
    import torch

    if not asked.dry and not torch.cuda.is_available():
        print("tests/bench/kernels_gpu.py needs a GPU that torch can use; there is none here", file=sys.stderr)
        sys.exit(2)
    until_s = time.monotonic() + WHOLE_S
    result: dict[str, Any] = machine(asked.dry)
    for name, seconds in PARTS.items():
        left_s = until_s - time.monotonic() - GRACE_S
        result[name] = one(name, asked.dry, min(seconds, left_s)) if left_s > GRACE_S else {"failed": "no time left"}
    left_s = until_s - time.monotonic() - GRACE_S
    result["tuning"] = tune(asked.dry, left_s) if left_s > LEAST_TUNING_S else {"failed": "no time left"}
    failed = [name for name in (*PARTS, "tuning") if "failed" in result[name]]
    result |= {"faults": faults(result), "not_measured": failed, "goals_missed": unmet(result)}
    if asked.dry:
        print(json.dumps(result, indent=2))
    else:
        from _record import write

        write("kernels_gpu", result, "torch", "triton")
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
