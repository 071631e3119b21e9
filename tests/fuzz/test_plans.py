"""Attack: edited plans are shown and rendered as by the commands. Findings are right; other exceptions are defects."""

from __future__ import annotations

import copy
import json
import random
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from _attack import Attack
from _limits import bounded
from _mutations import NUMBERS, SEEDS, TEXTS, copy_elsewhere, delete, places, retype, text_of
from typer.testing import CliRunner

from partool.cli import plan as plan_command
from partool.cli import render as render_command
from partool.plan.types import NOT_RUN, Plan
from partool.planner import make_plan
from partool.spec import load_text

CPU_S = 20.0
MEMORY_GIB = 1.0
SHOWN = (
    [],
    ["--all"],
    ["--breakdown"],
    ["--show", "layout"],
    ["--show", "gemms"],
    ["--show", "timeline"],
    ["--output", "json"],
)
TARGETS = ("torchrun", "slurm", "k8s")


@cache
def plans() -> dict[str, dict[str, Any]]:
    """Return plans of small specs, as data that nobody changes."""
    found = {}
    for name in ("gpu", "two nodes", "pipeline", "sequence", "experts"):
        spec = load_text(text_of(SEEDS[name])).spec
        assert spec is not None
        plan = make_plan(spec, base_dir=Path("/base"), default_name="attacked").plan
        assert plan is not None, name
        found[name] = json.loads(plan.to_json())
    return found


def extreme(rng: random.Random, document: dict[str, Any]) -> None:
    """Set a number or a text outside the sections in ``NOT_RUN`` to an extreme value."""
    section = document[rng.choice([name for name in document if name not in NOT_RUN])]
    there = list(places(section)) or list(places(document))
    at, key = rng.choice(there)
    at[key] = rng.choice(NUMBERS if isinstance(at[key], int | float) else TEXTS)


def extra(rng: random.Random, document: dict[str, Any]) -> None:
    """Add an unknown key to some section."""
    sections = [document, *(at[key] for at, key in places(document) if isinstance(at[key], dict))]
    rng.choice(sections)[rng.choice(TEXTS)] = rng.choice(NUMBERS)


def edited(rng: random.Random, known: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    name = rng.choice(list(known))
    document = copy.deepcopy(known[name])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice([extreme, extreme, extreme, extreme, retype, delete, extra, copy_elsewhere])(rng, document)
    return name, document


def changes(before: Any, after: Any, place: str = "") -> list[str]:
    """Return the differences, as ``place: value``."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [text for key in keys for text in changes(before.get(key), after.get(key), f"{place}.{key}")]
    return [] if before == after else [f"{place}: {str(after)[:200]}"]


@pytest.mark.timeout(1200)
def test_edited_plans_are_shown_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    show, render = (typer.Typer(add_completion=False, pretty_exceptions_enable=False) for _ in range(2))
    show.command()(plan_command.command)
    render.command()(render_command.command)
    known, file, readable = plans(), tmp_path / "plan.json", 0
    attack = Attack("plans", least=25)
    for number, rng in attack.cases():
        name, document = edited(rng, known)
        calls = [(show, [str(file), *rng.choice(SHOWN)]), (render, [str(file), "--target", rng.choice(TARGETS)])]
        with attack.case(number, lambda name=name, new=document: "\n".join([name, *changes(known[name], new)])):
            file.write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")
            for app, arguments in calls:
                with bounded(CPU_S, MEMORY_GIB):
                    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
                said = f"{arguments[1:]}: exit code {result.exit_code}: {result.output[-500:]}"
                assert result.exit_code in (0, 1, 3), said
                assert result.exit_code == 0 or "PT" in result.output, said
            if app is render and result.exit_code == 0:
                readable += 1
                plan = Plan.from_json(file.read_text(encoding="utf-8"))
                assert plan.layout.mesh.world_size == plan.devices.nodes * plan.devices.per_node
    print(f"{readable} of {attack.tried} were rendered")
    attack.judge()


def test_groups_that_do_not_divide_their_ranks_are_refused() -> None:
    """Also where a layout has no such ranks: this must not divide by zero."""
    for section, name, value in (("tensor", "shape", [1, 7]), ("sequence", "ulysses", 7), ("sequence", "teams", 7)):
        for document in plans().values():
            edited_ = deepcopy(document)
            edited_["layout"][section][name] = value
            plan = Plan.from_json(json.dumps(edited_))
            assert name in plan.contradiction
            assert not Plan.from_json(json.dumps(document)).contradiction
