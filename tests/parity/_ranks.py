"""Starts a few gloo ranks for a test and collects what they return."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_ranks(script: Path, world_size: int, *arguments: str, timeout_s: float = 150) -> None:
    """Run ``python script arguments`` as ``world_size`` ranks; fails with the ranks' output if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *arguments],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(ranks) if process.returncode != 0]
    assert not failed, "\n".join(f"rank {rank}:\n{outputs[rank]}" for rank in failed)
