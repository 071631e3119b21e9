"""``python -m partool_runtime.dry PLAN RANK...``: dry-run ranks of a plan; prints one line of JSON per rank."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from partool.plan.types import Plan
from partool_runtime.dry import shim
from partool_runtime.errors import ConfigurationError


def main(path: Path, ranks: list[int]) -> int:
    """Dry-run ``ranks``, one after the other; return the exit code."""
    plan = Plan.from_json(path.read_text(encoding="utf-8"))
    try:
        if plan.devices.backend != "cpu":
            shim.load(Path(os.environ.get("PARTOOL_HOME", ".partool")).absolute() / "dry")
            _install(plan)
    except ConfigurationError as error:
        print(json.dumps({"code": error.code, "message": error.message, "help": error.help}))
        return 2
    from partool_runtime.dry.rank import dry_rank

    for rank in ranks:
        print(json.dumps(asdict(dry_rank(plan, rank))), flush=True)
    return 0


def _install(plan: Plan) -> None:
    from partool_runtime.dry.device import install

    digits = plan.devices.architecture.removeprefix("sm_")
    capability = (int(digits[:-1]), int(digits[-1])) if digits.isdecimal() else (9, 0)
    install(plan.devices.accelerator, capability, plan.devices.memory_bytes, plan.devices.per_node)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(rank) for rank in sys.argv[2:]]))
