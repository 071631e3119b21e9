"""What partool writes for another system, as that system is given it: files, and the words of the command."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from partool.plan.types import Plan
from partool.render.program import program

_TOLD = '#!/bin/bash\nprintf "%s\\0" "$@" > "$LOG"; env -0 > "$LOG.env"\n'


@cache
def _tools(folder: Path) -> Path:
    tools = folder / "tools"
    tools.mkdir()
    for name in ("torchrun", "accelerate"):
        (tools / name).write_text(_TOLD)
        (tools / name).chmod(0o755)
    return tools


def command(plan: Plan, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write a plan and run its script, around mine.py; return its launcher's words and environment."""
    files = program(plan).files
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    log = folder / "log"
    own = {"PATH": f"{_tools(folder)}:{os.environ['PATH']}", "LOG": str(log), "SCRIPT": "mine.py"}
    script = ["mine.py"] if plan.engine == "deepspeed" else []
    subprocess.run(["bash", str(folder / "train.sh"), *script], env=os.environ | own, check=True, timeout=60)
    pairs = log.with_name("log.env").read_text(encoding="utf-8").split("\0")
    environment = dict(pair.partition("=")[::2] for pair in pairs if pair)
    return log.read_text(encoding="utf-8").split("\0")[:-1], environment
