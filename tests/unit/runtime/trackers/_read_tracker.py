"""Prints what a tracker has stored of a run, as JSON: ``runs``, and figure → step → values, the earliest first.

``python _read_tracker.py NAME RUN_DIR``, with the tracker's package on the path.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

Points = Iterator[tuple[str, int, float]]


def blocks(file: Path) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format (doc/log_format.md), behind W&B's header of seven bytes."""
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield parts
            parts = b""


def wandb(run_dir: Path) -> tuple[int, Points]:
    from wandb.proto import wandb_internal_pb2

    files = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)

    def points() -> Points:
        own_steps = set[int]()
        for file in files:
            for block in blocks(file):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(block)
                if record.WhichOneof("record_type") != "history":
                    continue
                row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                assert row["_step"] not in own_steps, "W&B would drop one of the two"
                own_steps.add(row["_step"])
                yield from ((name, row["step"], row[name]) for name in row if "/" in name)

    return len({file.name for file in files}), points()


def mlflow(run_dir: Path) -> tuple[int, Points]:
    with sqlite3.connect(run_dir.parent.parent / "mlflow.db") as database:
        runs = database.execute("select count(*) from runs").fetchone()[0]
        rows = database.execute("select key, step, value from metrics order by timestamp").fetchall()
    return runs, iter(rows)


def trackio(run_dir: Path) -> tuple[int, Points]:
    (file,) = (run_dir / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    return len({row[0] for row in rows}), (
        (name, step, value) for _, step, text in rows for name, value in json.loads(text).items()
    )


def tensorboard(run_dir: Path) -> tuple[int, Points]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    tags = read.Tags()["scalars"]
    return 1, ((tag, point.step, point.value) for tag in tags for point in read.Scalars(tag))


if __name__ == "__main__":
    runs, points = globals()[sys.argv[1]](Path(sys.argv[2]))
    found: dict[str, dict[int, list[float]]] = {}
    for name, step, value in points:
        found.setdefault(name, {}).setdefault(int(step), []).append(value)
    print(json.dumps({"runs": runs, "figures": found}))
