"""Metadata of every benchmark result: the machine and the versions it was measured with."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions(*packages: str) -> dict[str, str]:
    return {name: metadata.version(name) for name in packages}


def write(name: str, result: dict[str, Any], *packages: str) -> None:
    """Write ``results/<name>.json`` and print it; ``packages`` are those whose versions are recorded."""
    record = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **_versions(*packages)},
        **result,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))
