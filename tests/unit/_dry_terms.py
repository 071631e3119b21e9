"""``python _dry_terms.py CACHE PLAN:RANK...``: dry-runs a rank of each plan; prints its memory terms as JSON."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from partool.plan.types import Plan
from partool_runtime.dry import shim

if __name__ == "__main__":
    shim.load(Path(sys.argv[1]))  # before torch

from partool_runtime.dry import rank as dry
from partool_runtime.dry.device import install
from partool_runtime.dry.memory import MemoryRecord
from partool_runtime.errors import ConfigurationError

RECORDS: list[MemoryRecord] = []


class _Kept(MemoryRecord):
    """A record that can be asked after its run."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        RECORDS.append(self)


def without_working(record: MemoryRecord) -> dict[str, int]:
    """Return the bytes by term at the moment with most bytes outside of working tensors, which are left out."""
    held: dict[str, int] = defaultdict(int)
    most, found = 0, dict(held)
    for at, entry in enumerate(record.log):
        made = record.made[entry if entry >= 0 else ~entry]
        held[made.term] += made.size_bytes if entry >= 0 else -made.size_bytes
        total = sum(held.values()) - held["working"]
        if at >= record._begin and total > most:
            most, found = total, {term: size for term, size in held.items() if term != "working"}
    return found


def main(cases: list[str]) -> None:
    """Print one line per case: the terms at the peak and without working tensors, or the code of the refusal."""
    setattr(dry, "MemoryRecord", _Kept)  # noqa: B010 - the module does not export it
    for case in cases:
        path, _, rank = case.rpartition(":")
        plan = Plan.from_json(Path(path).read_text())
        install(plan.devices.accelerator, (9, 0), plan.devices.memory_bytes, plan.devices.per_node)
        try:
            trace = dry.dry_rank(plan, int(rank), compiled=plan.layout.compile != "none")
        except ConfigurationError as error:
            print(json.dumps({"refused": error.code}), flush=True)
            continue
        assert trace.memory is not None
        found = {"peak": trace.memory.terms_bytes, "kept": without_working(RECORDS[-1])}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
