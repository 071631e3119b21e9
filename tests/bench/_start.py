"""Starts the ranks of a measurement and waits for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def start_ranks(
    script: Path,
    folder: Path,
    ranks: int,
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    inside: Callable[[int], Sequence[str]] = lambda rank: (),
) -> None:
    """Run ``script FOLDER/job.json FOLDER/<rank>.json`` as ``ranks`` processes; raise RuntimeError if one fails.

    ``inside`` returns the prefix of a rank's command.
    """
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    processes = []
    try:
        for rank in range(ranks):
            files = str(folder / "job.json"), str(folder / f"{rank}.json")
            command = [*inside(rank), sys.executable, str(script), *files]
            log = (folder / f"{rank}.log").open("w", encoding="utf-8")
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
            log.close()
        _wait(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # A rank killed here was only waiting, for a failed rank or for a message that never came.
    failed = [rank for rank, process in enumerate(processes) if process.returncode > 0]
    if any(process.returncode for process in processes):
        logs = {
            rank: (folder / f"{rank}.log").read_text(encoding="utf-8").splitlines() for rank in failed or range(ranks)
        }
        raise RuntimeError("\n".join(f"rank {rank}:\n" + "\n".join(lines[-15:]) for rank, lines in logs.items()))


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Return once all ranks have ended, one has failed, or the time is up."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
