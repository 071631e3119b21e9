"""Records losses of training under awkward layouts in ``golden_losses.json``: run it to write the file anew.

The bits depend on the processor and on torch, which stand beside them: elsewhere they are no evidence of a change.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools, Server

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from _golden import fixed_machine
from _golden_specs import CASES, text_of

from partool.catalog.machine import processor
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.spec import load_text
from partool.spec.data import DataSpec

RECORD = Path(__file__).with_name("golden_losses.json")
STEPS = 3


def where() -> dict[str, str]:
    """Return what the bits depend on."""
    flags = "avx512" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "other"
    return {"processor": processor(), "vectors": flags, "machine": platform.machine(), "torch": torch.__version__}


def plans(text: Path) -> dict[str, Plan]:
    """Return the plans of the recorded specs that run on CPU ranks, on a few small files."""
    found = {}
    with fixed_machine():
        for name, (base, _) in CASES.items():
            if base["hardware"]["accelerator"] != "cpu":
                continue
            spec, folder = text_of(name)
            loaded = load_text(spec)
            result = loaded.spec and make_plan(loaded.spec, base_dir=folder, default_name=name)
            if result and result.plan and result.plan.runnable:
                training = result.plan.training.model_copy(update={"steps": STEPS, "log_every": 1})
                data = DataSpec(source=str(text), cache=str(text.parent / "cache"))
                found[name] = result.plan.model_copy(update={"training": training, "data": data})
    return found


def losses(folder: Path, pools: Pools) -> dict[str, list[list[str]]]:
    """Train each plan; return the loss and the norm of the gradients of each step, exactly."""
    write_text(folder / "text")
    by_ranks: dict[int, dict[str, Plan]] = defaultdict(dict)
    for name, plan in plans(folder / "text").items():
        by_ranks[plan.layout.mesh.world_size][name] = plan
    found: dict[str, list[list[str]]] = {}
    for ranks, some in sorted(by_ranks.items()):
        jobs = Jobs(folder / str(ranks), pools, timeout_s=600)
        jobs.folder.mkdir()
        for name, plan in some.items():
            jobs.train(name, plan, run=name)
        for name in some:
            assert jobs.ended(name) == "done", f"{name}: {jobs.ended(name)}"
            found[name] = [[_exact(step[key]) for key in ("loss", "grad_norm")] for step in jobs.events(name, "step")]
    return found


def _exact(value: Any) -> str:
    return float(value).hex()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, Server() as server, Pools(server) as pools:
        record = {"where": where(), "losses": losses(Path(name), pools)}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
