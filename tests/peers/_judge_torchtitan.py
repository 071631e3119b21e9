"""torchtitan's parser of job configurations (0.2.2)."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigManager


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """Parse a job.toml with the class that ``torchtitan.train`` uses; return its sections."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "job.toml"
        path.write_text(case["config"], encoding="utf-8")
        return dataclasses.asdict(ConfigManager().parse_args(["--job.config_file", str(path)]))
