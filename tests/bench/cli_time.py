"""Wall time of ``partool --help``, of ``plan`` and ``render`` with specs/quickstart.yaml, and of a bare interpreter.

The commands alternate. "Cold" means a fresh process with a warm file cache. With root, the file cache is also dropped
for one extra measurement of each command.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from _record import write

ROOT = Path(__file__).parents[2]
PARTOOL = Path(sys.executable).parent / "partool"
COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "help": [str(PARTOOL), "--help"],
    "plan": [str(PARTOOL), "plan", "specs/quickstart.yaml"],
    "render_slurm": [str(PARTOOL), "render", "specs/quickstart.yaml", "--target", "slurm"],
    "render_k8s": [
        *(str(PARTOOL), "render", "specs/quickstart.yaml", "--target", "k8s"),
        *("--set", "launch.image=partool:cpu", "--set", "launch.k8s.storage=pvc:runs"),
    ],
}
ROUNDS = 15


def wall_s(command: list[str]) -> float:
    """Return the seconds one run of the command takes."""
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def drop_file_cache() -> bool:
    """Drop the page cache; return False if that is not allowed."""
    try:
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def main() -> None:
    """Measure and write the result."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            times[name].append(wall_s(command))
    uncached = {name: wall_s(command) if drop_file_cache() else None for name, command in COMMANDS.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    write(
        "cli_time",
        {
            "rounds": ROUNDS,
            "median_s": medians,
            "max_s": {name: max(values) for name, values in times.items()},
            "no_file_cache_s": uncached,
            "goal_s": {"help": 0.2, "plan": 0.5, "render_slurm": 0.6, "render_k8s": 0.6},
            "ratio_to_python": {name: medians[name] / medians["python"] for name in COMMANDS if name != "python"},
        },
        "typer",
        "pydantic",
        "rich",
    )


if __name__ == "__main__":
    main()
