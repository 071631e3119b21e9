"""CPU seconds and peak memory of whole ``partool plan`` commands, each in a fresh process on one core.

``python tests/bench/plan_time.py [OTHER]``: OTHER is the ``partool`` command of another version, whose runs alternate
with those of this one. CPU seconds are user and system seconds of the command and its children. Each run has an empty
``PARTOOL_HOME``, so that only bytecode is cached. The goals are for a machine that runs nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _record import write

ROOT = Path(__file__).parents[2]
PARTOOL = Path(sys.executable).parent / "partool"
ROUNDS = 5
RSS_GOAL_BYTES = 300e6
SPEC_GOAL_S = 1.5
LARGE: dict[str, tuple[str, int, int, float]] = {
    "70b_1024": ("llama3-70b", 128, 1024, 2.0),
    "405b_16384": ("llama3-405b", 2048, 2048, 4.0),
    "deepseek_256": ("deepseek-v3", 32, 2048, 4.0),
    "deepseek_2048": ("deepseek-v3", 256, 2048, 4.0),
    "405b_8_nothing_fits": ("llama3-405b", 1, 2048, 4.0),
}
"""Model, nodes of 8 H100s, sequences per step, and the goal in CPU seconds; specs that leave the whole layout open."""
GOALS_S = {"specs/quickstart.yaml": 0.4}
_MEASURE = """\
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, done.returncode, done.stdout]))
"""


@dataclass(frozen=True)
class Case:
    """A command to measure."""

    words: list[str]
    goal_s: float
    exit_code: int = 0


def cases(folder: Path) -> dict[str, Case]:
    """Return the commands by name; specs of large searches are written into ``folder``."""
    found = {"help": Case(["--help"], 0.1)}
    for path in sorted((ROOT / "specs").glob("*.yaml")):
        name = f"specs/{path.name}"
        found[name] = Case(["plan", str(path), "--output", "json"], GOALS_S.get(name, SPEC_GOAL_S))
    for name, (model, nodes, batch, goal_s) in LARGE.items():
        spec = folder / f"{name}.yaml"
        spec.write_text(
            f"model: {model}\nhardware: {{accelerator: h100-sxm, nodes: {nodes}}}\ndata: python-stdlib\n"
            f"training: {{sequence_length: 8192, global_batch: {batch}, steps: 100000}}\n",
            encoding="utf-8",
        )
        found[name] = Case(["plan", str(spec), "--output", "json"], goal_s, int("nothing_fits" in name))
    return found


def measure(partool: Path, case: Case) -> tuple[float, int, str]:
    """Return CPU seconds, peak resident bytes and standard output of one cold command on one core."""
    core = min(os.sched_getaffinity(0))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, str(partool), *case.words],
            capture_output=True,
            text=True,
            check=True,
            env={**environment, "PARTOOL_HOME": home},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    seconds, peak, code, text = json.loads(done.stdout)
    if code != case.exit_code:
        raise RuntimeError(f"{' '.join(case.words)} ended with {code}")
    return seconds, peak, text


def summary(case: Case, runs: list[tuple[float, int, str]], others: list[float]) -> dict[str, Any]:
    """Return the record of one case."""
    seconds = [run[0] for run in runs]
    found: dict[str, Any] = {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "goal_s": case.goal_s,
        "reached": statistics.median(seconds) <= case.goal_s,
        "peak_rss_bytes": max(run[1] for run in runs),
    }
    if others:
        found |= {"other_median_s": statistics.median(others), "other_min_s": min(others)}
    text = runs[0][2]
    if text.startswith("{") and "search" in (plan := json.loads(text)):
        found["search"] = {key: value for key, value in plan["search"].items() if key != "pruned"}
    return found


def main() -> None:
    """Measure all cases in turn, ``ROUNDS`` times, and write the result."""
    other = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        every = cases(Path(folder))
        measure(PARTOOL, every["specs/quickstart.yaml"])  # writes bytecode
        runs: dict[str, list[tuple[float, int, str]]] = {name: [] for name in every}
        others: dict[str, list[float]] = {name: [] for name in every}
        for _ in range(ROUNDS):
            for name, case in every.items():
                runs[name].append(measure(PARTOOL, case))
                if other is not None:
                    others[name].append(measure(other, case)[0])
    results = {name: summary(case, runs[name], others[name]) for name, case in every.items()}
    for name, one in results.items():
        verdict = "reached" if one["reached"] else "NOT REACHED"
        print(f"{name:36s} {one['median_s']:6.2f} CPU s, goal {one['goal_s']:.1f}: {verdict}")
    write("plan_time", {"rounds": ROUNDS, "unit": "CPU seconds", "goal_rss_bytes": RSS_GOAL_BYTES, "cases": results})


if __name__ == "__main__":
    main()
