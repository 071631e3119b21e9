"""``python -m partool_runtime.calibrate [--sizes full|quick] [--ranks N]`` measures this machine; JSON on stdout.

With ``--folder DIR`` it also measures how fast the file system of this folder is written.

Progress goes to standard error. After SIGINT or SIGTERM the measurements made so far are written, with
``"complete": false``, and the exit code is 130. The exit code is 1 if a rank failed or did not end in time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from partool.process import python_command
from partool_runtime.agent.lifeline import end_with_parent
from partool_runtime.calibrate.fit import figures
from partool_runtime.calibrate.storage import MOST_BYTES, storage_line
from partool_runtime.private import keep_compiled_code_private

_SECONDS = {"full": 1.5, "quick": 0.25, "tiny": 0.005}
_INTERRUPTED = 130
_UNITS = {"flop": ("GFLOP/s", 1e9), "byte": ("GB/s", 1e9), "operator": ("M/s", 1e6), "parameter": ("M/s", 1e6)}


class _StopError(Exception):
    """A signal requested to stop, or the time limit is over."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m partool_runtime.calibrate", description="Measures this machine.")
    parser.add_argument("--sizes", choices=sorted(_SECONDS), default="full")
    parser.add_argument("--ranks", type=int, default=0, help="ranks that work at once; 0: one per accelerator, or 2")
    parser.add_argument("--folder", type=Path, help="folder of runs, whose file system is measured")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which it is given up")
    arguments = parser.parse_args(argv)
    keep_compiled_code_private(os.environ)
    if parent := os.environ.pop("PARTOOL_LAUNCHER_PID", None):
        end_with_parent(int(parent), signal.SIGTERM)
    ranks = arguments.ranks or _default_ranks()
    lines: list[dict[str, Any]] = []
    code = 0
    with tempfile.TemporaryDirectory(prefix="partool-calibrate-") as folder, _stop_signals(arguments.limit):
        processes = _start(ranks, arguments.sizes, Path(folder))
        try:
            output = processes[0].stdout
            assert output is not None
            _collect(output, lines)
            code = int(any(process.wait() for process in processes))
            if arguments.folder is not None and not code:
                _add_storage(lines, arguments.folder.absolute(), ranks, arguments.sizes)
        except _StopError as stop:
            print(f"partool: {stop}", file=sys.stderr)
            code = _INTERRUPTED
        finally:
            _end(processes)
    head: dict[str, Any] = lines.pop(0) if lines else {"machine": {}, "items": 0}
    result = {
        "machine": {**head["machine"], "ranks": ranks},
        "sizes": arguments.sizes,
        "complete": code == 0 and len(lines) == head["items"],
        "figures": figures(lines, str(head["machine"].get("backend", "cpu")), ranks),
        "measurements": lines,
    }
    print(json.dumps(result))
    return code


def _default_ranks() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else min(2, len(os.sched_getaffinity(0)))


def _start(ranks: int, sizes: str, folder: Path) -> list[subprocess.Popen[str]]:
    """Start the ranks, each with an equal share of the machine's cores."""
    command = python_command("partool_runtime.calibrate.rank", "--sizes", sizes)
    command += ["--seconds", str(_SECONDS[sizes]), "--store", str(folder / "store"), "--parent", str(os.getpid())]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "WORLD_SIZE": str(ranks)}
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback and "GLOO_SOCKET_IFNAME" not in environment:
        environment["GLOO_SOCKET_IFNAME"] = loopback[0]
    return [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]


def _collect(output: IO[str], lines: list[dict[str, Any]]) -> None:
    """Read rank 0's lines as they arrive and report progress."""
    begun = time.monotonic()
    for text in output:
        lines.append(json.loads(text))
        if len(lines) > 1:
            place = f"[{len(lines) - 1:>{len(str(lines[0]['items']))}}/{lines[0]['items']}]"
            print(f"{place} {time.monotonic() - begun:4.0f} s  {_shown(lines[-1])}", file=sys.stderr, flush=True)


def _add_storage(lines: list[dict[str, Any]], folder: Path, ranks: int, sizes: str) -> None:
    """Measure the storage of runs after everything else; report if it cannot be measured."""
    try:
        line = storage_line(folder, ranks, MOST_BYTES[sizes], _SECONDS[sizes])
    except OSError as error:
        print(f"partool: writes to {error.filename or folder} are not measured: {error.strerror}", file=sys.stderr)
        return
    lines.append(line)
    lines[0]["items"] += 1
    print(f"[{len(lines) - 1}/{lines[0]['items']}] {_shown(line)}", file=sys.stderr, flush=True)


def _shown(line: dict[str, Any]) -> str:
    unit, factor = _UNITS[line["work_unit"]]
    name = " ".join(filter(None, (line["kind"], line["precision"], line["name"])))
    return f"{name}: {line['work'] / line['seconds'] / factor:.4g} {unit}"


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


@contextmanager
def _stop_signals(limit_s: float) -> Iterator[None]:
    """Make SIGINT, SIGTERM and the time limit raise an exception in the main thread."""

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGALRM:
            raise _StopError(f"not done after {limit_s:g} s")
        raise _StopError(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
