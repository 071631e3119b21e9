"""The specs of fine-tuning learn: the loss on what they hold out falls.

One is trained each time, small and from random weights; the long test trains all three as they are, for fewer steps,
from a base that is trained first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
from _jobs import Jobs
from _ranks import Pools
from often import often
from planned import plan_of

SPECS = Path(__file__).parents[2] / "specs" / "finetune"
MODULES = ("argparse", "os", "logging", "re", "random", "statistics", "shutil", "subprocess", "socket", "datetime")
SMALL = "model: {layers: 2, hidden: 64, ffn_hidden: 128, heads: 4, vocab: 2048, max_position: 256}"
OVERRIDES = (
    "hardware.per_node=1", "training.steps=12", "training.global_batch=8", "training.validation.every=6",
    "training.validation.samples=16", "optimizer.lr=3e-3", "data.validation=0.1",
)  # fmt: skip


def make_data(folder: Path, *modules: str) -> None:
    """Write the data of the specs, of some modules of the standard library or of all."""
    spec = importlib.util.spec_from_file_location("make_data", SPECS / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    made: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.main(folder, modules or made.MODULES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finetune")
    make_data(place / "data", *MODULES)
    return place


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", often(["chat", "lora", "dpo"], ["dpo"]))
def test_a_small_model_learns(pools: Pools, place: Path, name: str) -> None:
    text = re.sub(r"(?m)^model: .*$", SMALL, (SPECS / f"{name}.yaml").read_text(encoding="utf-8"))
    text = re.sub(r"(?m)^  epochs: .*\n", "", text)
    # An adapter of rank 16 beside random weights learns as it does here only with the embedding.
    more = ["adapter.train=[embed, norms]"] if name == "lora" else []
    plan = plan_of(text, *OVERRIDES, f"data.cache={place / 'cache'}", *more, folder=place)
    jobs = Jobs(place, pools)
    jobs.train(name, plan, run=name)
    assert jobs.ended(name) == "done"
    losses = [each["loss"] for each in jobs.events(name, "validation")]
    first = jobs.events(name, "step")[0]["loss"]
    assert len(losses) == 2
    assert losses[1] < losses[0] < first, (first, losses)


def launched(folder: Path, spec: str, *overrides: str) -> list[dict[str, Any]]:
    """Launch a spec and return its validations."""
    environment = {**os.environ, "PARTOOL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}

    def partool(*words: str) -> None:
        command = [sys.executable, "-m", "partool", *words]
        run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]

    if spec != "base":
        partool("data", "prepare", f"{spec}.yaml")
    partool("launch", f"{spec}.yaml", *(word for each in overrides for word in ("--set", each)))
    if spec in ("base", "chat"):
        partool("export", "last", "--out", spec)
    [log] = (folder / "home" / "runs").glob(f"finetune-{spec}-*/events/rank-0.jsonl")
    events = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    return [event["data"] for event in events if event["kind"] == "validation"]


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_specs_learn_one_after_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "finetune"
    copytree(SPECS, folder, ignore=ignore_patterns("data", "base", "chat", "__pycache__"))
    make_data(folder / "data")
    losses = {"base": launched(folder, "base", "training.steps=60", "training.validation.every=30")}
    for spec in ("chat", "lora", "dpo"):
        losses[spec] = launched(folder, spec, "training.validation.every=5", "training.epochs=0.6")
    for spec, each in losses.items():
        assert each[-1]["loss"] < each[0]["loss"], (spec, [one["loss"] for one in each])
    assert losses["dpo"][-1]["preferences"]["accuracy"] > 0.6
