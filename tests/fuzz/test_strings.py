"""Attack ``strings``: harmful text in any string of a spec or a plan, rendered for every target and run.

Either the text is refused, or the rendered scripts run under bash with fake commands: no part of the text is executed,
and nothing is written outside the folder of runs.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from _attack import Attack
from _hostile import CANARY, HARM
from _slurm_stage import Stage

from partool.launch.store import RunStore
from partool.launch.submit import job_of
from partool.plan.types import NOT_RUN, Plan
from partool.planner import make_plan
from partool.planner.rules.launching import check_launch
from partool.render.render import findings, render
from partool.spec import load_text

TARGETS = ("slurm", "torchrun", "k8s")
PATHS = ["..", ".", "../../..", "../../../escaped", "/escaped", "a/../../b", "~", "~root/x", "x\0y", "\0"]
PIECES = [
    "$(",
    ")",
    "`",
    "'",
    '"',
    ";",
    "\n",
    "\r",
    "\\",
    f"touch {CANARY}",
    "{{",
    "}}",
    "#",
    "x",
    " ",
    "../",
    "&",
    "|",
]
OPEN = {"env", "secrets", "options", "labels", "annotations", "node_selector", "groups"}
"""Sections whose keys the user names."""
ROOT = Path(__file__).parents[2]


def rich(target: str, python: str) -> dict[str, Any]:
    """Return a spec with text in as many places as one valid spec can have."""
    launch: dict[str, Any] = {
        "target": target,
        "python": python,
        "env": {"A": "1", "LC_ALL": "C"},
        "secrets": {"TOKEN_A": {"file": "/etc/a"}},
    }
    if target == "slurm":
        options = {"mail-type": "END", "licenses": "a"}
        names = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude")
        launch["slurm"] = dict.fromkeys(names, "x") | {"time": "10:00", "memory": "8G", "options": options}
    if target == "k8s":
        launch["secrets"] = {"TOKEN_A": {"secret": "a", "key": "k"}}
        launch["image"] = "team/train:1"
        launch["mounts"] = [{"source": "pvc:data", "target": "/data"}, {"source": "/x", "target": "/y"}]
        launch["k8s"] = {
            "namespace": "a", "context": "a", "queue": "a", "priority": "a", "node_selector": {"a": "b"},
            "tolerations": [{"key": "a", "value": "b"}], "cpu": "2", "memory": "64Gi", "shared_memory": "4Gi",
            "storage": "pvc:runs", "service_account": "a", "image_pull_secrets": ["a"], "labels": {"a": "b"},
            "annotations": {"a": "b"}, "topology": {"level": "rack"}, "kind": "job", "runtime": "torch-distributed",
        }  # fmt: skip
    return {
        "name": "attacked",
        "model": {
            "layers": 2, "hidden": 64, "ffn_hidden": 128, "heads": 2, "vocab": 256, "frozen": ["head.*"],
        }
        | ({} if target == "torchrun" else {"weights": {"source": "checkpoint", "path": "/elsewhere/weights"}}),
        "hardware": {"accelerator": "cpu", "nodes": 2, "per_node": 2},
        "parallel": {
            "tensor": 1, "pipeline": 1, "sequence": 1, "micro_batch": 1, "recompute": "none", "compile": "none",
            "data": {"zero": 1, "shard": 4}, "offload": "none",
        },
        "training": {"sequence_length": 64, "global_batch": 4, "steps": 2, "precision": "fp32"},
        "optimizer": {"groups": {"embed.*": {"lr_factor": 0.5}}},
        "data": {"source": ["README.md"], "format": "text", "text_field": "text", "cache": "/data/cache"},
        "checkpoint": {"every": "30min", "dir": "/data/checkpoints"},
        "launch": launch,
    }  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of texts in a document: of values, and of keys that the user names, with None appended."""
    if isinstance(data, dict):
        for key, value in data.items():
            if path and path[-1] in OPEN:
                yield (*path, key, None)
            yield from places(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from places(value, (*path, index))
    elif isinstance(data, str):
        yield path


def planted(data: Any, path: tuple[Any, ...], text: str) -> Any:
    """Return a document with a text at one of its places."""
    changed = copy.deepcopy(data)
    *way, last = path
    if last is None:
        *way, last = way
    at = changed
    for part in way:
        at = at[part]
    if path[-1] is None:
        at[text] = at.pop(last)
    else:
        at[last] = text
    return changed


def drawn(rng: random.Random) -> str:
    """Return a harmful text."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(HARM)
    return rng.choice(PATHS) if kind < 0.6 else "".join(rng.choices(PIECES, k=rng.randint(1, 8)))


def planned(document: dict[str, Any]) -> Plan | None:
    """Return the plan of a spec; None where the spec is refused."""
    loaded = load_text(json.dumps(document, ensure_ascii=False))
    if loaded.spec is None or loaded.diagnostics:
        return None
    return make_plan(loaded.spec, base_dir=ROOT, default_name="attacked").plan


def read(document: dict[str, Any]) -> Plan | None:
    """Return a plan as it is read from a file; None where the file is refused."""
    try:
        plan = Plan.from_json(json.dumps(document))
    except ValidationError:
        return None
    found = check_launch(plan.launch, plan.devices)
    return None if any(finding.severity == "error" for finding in found) else plan


def run(plan: Plan, folder: Path) -> bool:
    """Render a plan and run the scripts; return False where it cannot be rendered."""
    store = RunStore(folder / "home")
    current = store.next_submitted(plan.name, plan.hash)
    assert Path(os.path.normpath(current.path)).parent == store.root, f"{current.path} is outside {store.root}"
    job = job_of(plan, current, (), {}, None)
    if any(finding.severity == "error" for finding in findings(plan.launch.target, job)):
        return False
    rendered = render(plan.launch.target, job)
    if plan.launch.target == "k8s":
        _judge_manifest(rendered.text, plan)
        return True
    stage = Stage(folder / "stage")
    stage.run = current.path
    stage.run.joinpath("logs").mkdir(parents=True)
    stage.put(rendered)
    arguments = ("1", "head") if plan.launch.target == "torchrun" else ()
    stage.play("job.sbatch" if plan.launch.target == "slurm" else "commands.sh", *arguments)
    return True


def _judge_manifest(text: str, plan: Plan) -> None:
    documents = list(yaml.safe_load_all(text))
    kinds = [each["kind"] for each in documents]
    assert sorted(set(kinds) - {"NetworkPolicy"}) == ["ConfigMap", "Job", "Service"], text
    pod = documents[kinds.index("Job")]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert command[1:4] == ["-P", "-m", "partool_runtime.agent"]
    assert "/../" not in command[command.index("--run-dir") + 1]
    written = {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}
    assert {name: written[name] for name in plan.launch.env} == {
        name: value.replace("$", "$$") for name, value in plan.launch.env.items()
    }


def _strangers(folder: Path) -> list[str]:
    """Return the files that a case has left outside its own folders."""
    inside = {folder / "home", folder / "stage"}
    return [str(path) for path in folder.iterdir() if path not in inside] + [str(p) for p in folder.rglob(CANARY)]


@pytest.fixture
def bases(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Plan of the harmless spec for each target, as data."""
    python = str(tmp_path / "stage" / "bin" / "agent")
    found = {}
    for target in TARGETS:
        plan = planned(rich(target, python))
        assert plan is not None
        assert run(plan, tmp_path)
        data = json.loads(plan.to_json()) | {"candidates": [], "alternatives": []}
        data["kernels"]["tuned"] = ["/tuned"]
        data["hf"] = {"path": "/hf", "model_type": "llama", "architecture": "LlamaForCausalLM"}
        found[target] = data
        shutil.rmtree(tmp_path / "stage", ignore_errors=True)
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
    return found


def test_strings(tmp_path: Path, bases: dict[str, dict[str, Any]]) -> None:
    attack = Attack("strings", least=30)
    python = str(tmp_path / "stage" / "bin" / "agent")
    ran = 0
    for number, rng in attack.cases():
        target = rng.choice(TARGETS)
        of_plan = rng.random() < 0.6
        base = bases[target] if of_plan else rich(target, python)
        sections: dict[str, list[tuple[Any, ...]]] = {}
        for place in places(base):
            if not of_plan or place[0] not in NOT_RUN:
                sections.setdefault(place[0], []).append(place)
        place, text = rng.choice(sections[rng.choice(sorted(sections))]), drawn(rng)
        document = planted(base, place, text)
        with attack.case(number, lambda t=target, p=place, x=text: f"{t}: {p} = {x!r}"):
            plan = read(document) if of_plan else planned(document)
            ran += plan is not None and run(plan, tmp_path)
            assert not _strangers(tmp_path)
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    attack.judge()
    assert ran or attack.tried < 10
