"""State on disks against fio's io_uring at queue depth 32: the same bytes, disk and block size, in turns.

``python tests/bench/offload_io.py --dir /nvme``. Disks of virtual machines are throttled after a burst, and shared:
rounds are short and interleaved, and the result is the median of the rounds' ratios. fio's buffers are registered
(``fixedbufs``): otherwise they would be freshly mapped memory, which makes a short round up to twice as slow. The store
compares checksums, fio does not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import _record

from partool_runtime.offload.buckets import Bucket, fill_buckets
from partool_runtime.offload.disk import IO_BYTES, DiskStore

DTYPES = (torch.float32,) * 3
PASSES = 2
"""Passes per round."""


def fio(folder: Path, size_bytes: int, rw: str) -> float:
    """Return fio's bytes per second on a file that stays in the folder."""
    command = [
        "fio", "--name=peer", f"--filename={folder / 'fio'}", f"--size={size_bytes}", f"--bs={IO_BYTES}", f"--rw={rw}",
        "--ioengine=io_uring", "--iodepth=32", "--direct=1", "--fixedbufs", f"--loops={PASSES}", "--output-format=json",
    ]  # fmt: skip
    job = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)["jobs"][0]
    return float(sum(job[kind]["io_bytes"] for kind in ("read", "write")) / (job["job_runtime"] / 1e3))


def ours(store: DiskStore, buckets: list[Bucket], *, write: bool) -> float:
    """Return the bytes per second of an optimizer's passes over the state, without its arithmetic."""
    before = store.traffic.read_bytes + store.traffic.written_bytes
    began_s = time.perf_counter()
    for _ in range(PASSES):
        store.expect(range(len(buckets)))
        for bucket in buckets:
            with store.open(bucket.index, write=write):
                pass
    if write:
        store.flush()
    return (store.traffic.read_bytes + store.traffic.written_bytes - before) / (time.perf_counter() - began_s)


def measured(folder: Path, size_bytes: int, rounds: int, pause_s: float) -> dict[str, Any]:
    """Measure passes that read and passes that read and write; bytes per second and the ratios of rounds."""
    elements = size_bytes // 12 // 2**20 * 2**20
    buckets = fill_buckets([("state", elements)], 2**20)
    found: dict[str, dict[str, list[float]]] = {kind: {"ours": [], "fio": []} for kind in ("read", "read and write")}
    store = DiskStore(buckets, DTYPES, folder, buffers=8)
    ours(store, buckets, write=True)
    fio(folder, elements * 12, "write")
    for turn in range(rounds):
        for kind, rw in (("read", "read"), ("read and write", "rw")):
            size = elements * 12 * (2 if rw == "rw" else 1)
            works = {
                "ours": lambda rw=rw: ours(store, buckets, write=rw == "rw"),
                "fio": lambda size=size, rw=rw: fio(folder, size, rw),
            }
            for name in sorted(works, reverse=turn % 2 == 1):
                time.sleep(pause_s)
                found[kind][name].append(works[name]())
    waited = store.traffic.waited
    store.close()
    return {"waited": waited, **{kind: _summary(rates) for kind, rates in found.items()}}


def _summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [mine / other for mine, other in zip(rates["ours"], rates["fio"], strict=True)]
    summary: dict[str, Any] = {
        f"{name}_mb_per_s": [round(rate / 1e6) for rate in sorted(values)] for name, values in rates.items()
    }
    return {**summary, "median_ratio": round(statistics.median(ratios), 3), "ratios": [round(r, 3) for r in ratios]}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--mib", type=int, default=192, help="of state")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--pause-s", type=float, default=0.3, help="before each pass, so that a throttled disk recovers"
    )
    wanted = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is missing: apt-get install fio")
    with tempfile.TemporaryDirectory(dir=wanted.dir) as folder:
        result = measured(Path(folder), wanted.mib * 2**20, wanted.rounds, wanted.pause_s)
    version = subprocess.run(["fio", "--version"], capture_output=True, check=True, text=True).stdout.strip()
    result = {"fio": version, "mib": wanted.mib, "rounds": wanted.rounds, **result}
    _record.write("offload_io", result, "torch", "xxhash")


if __name__ == "__main__":
    main()
