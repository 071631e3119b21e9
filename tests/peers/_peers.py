"""Other training systems, installed in a folder of their own (``make peers``), and processes in which they judge."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("PARTOOL_PEERS", HERE.parents[1] / "build" / "peers"))
MODULES = {
    "deepspeed": "deepspeed",
    "megatron": "megatron/core",
    "accelerate": "accelerate",
    "torchtitan": "torchtitan/config",
    "trl": "trl/chat_templates",
    "peft": "peft",
    "bitsandbytes": "bitsandbytes",
}


def needed(*systems: str) -> None:
    """Skip a test if a system is not installed."""
    for system in systems:
        if not (FOLDER / MODULES[system]).exists() and importlib.util.find_spec(system) is None:
            pytest.skip(f"{system} is not in {FOLDER}: make peers")


def environment() -> dict[str, str]:
    """Return the environment of a process that imports the systems; packages that partool has, too, stay partool's."""
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "PARTOOL_PEERS": str(FOLDER)}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Judge:
    """A process that has imported a system. Use it as a context, which ends it."""

    def __init__(self, system: str, log: Path) -> None:
        self._log = log
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "_judge.py"), system], env=environment() | {"PYTHONPATH": _path()},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip
        assert self._answer() == "ready"

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate(timeout=60)

    def __call__(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the system made of a case; the test fails if it refused."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        verdict: dict[str, Any] = self._answer()
        assert "refused" not in verdict, f"{verdict['refused']}\n{verdict['trace']}\n{json.dumps(case, indent=1)}"
        return verdict

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._log.read_text(encoding="utf-8")[-3000:]
        return json.loads(line)


def _path() -> str:
    return os.pathsep.join((str(HERE), str(FOLDER)))
