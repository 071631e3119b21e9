"""Every rule has an example that breaks it and one that does not, and every code that is raised is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from often import often
from planned import findings_of

from partool.diagnostics import (
    _texts_chat,
    _texts_engines,
    _texts_files,
    _texts_hf,
    _texts_k8s,
    _texts_keeping,
    _texts_kernels,
    _texts_launch,
    _texts_machines,
    _texts_offload,
    _texts_parallel,
    _texts_partition,
    _texts_planner,
    _texts_planner_predictions,
    _texts_run,
    _texts_slurm,
    _texts_spec,
    _texts_tasks,
    _texts_verify,
)
from partool.diagnostics.rules import RULES, Rule, nearest
from partool.spec import load_text

ROOT = Path(__file__).parents[3]
TABLES = (_texts_files, _texts_spec, _texts_planner, _texts_parallel, _texts_launch, _texts_machines, _texts_slurm,
          _texts_k8s, _texts_run, _texts_hf, _texts_partition, _texts_tasks,
          _texts_kernels, _texts_offload, _texts_verify, _texts_engines, _texts_chat, _texts_keeping,
          _texts_planner_predictions)  # fmt: skip
OF_A_SPEC = [
    rule
    for module in (_texts_files, _texts_spec, _texts_launch, _texts_keeping)
    for rule in module.RULES
    if rule.example == "spec"
]
OF_THE_PLANNER = [
    rule
    for module in (
        _texts_engines,
        _texts_planner,
        _texts_planner_predictions,
        _texts_parallel,
        _texts_machines,
        _texts_partition,
        _texts_kernels,
        _texts_offload,
    )
    for rule in module.RULES
    if rule.example == "spec"
]
PLANNED = [rule for rule in OF_A_SPEC if rule.code[:3] in ("PT2", "PT4", "PT5")]


@pytest.mark.parametrize("rule", OF_A_SPEC, ids=lambda rule: rule.code)
def test_examples(rule: Rule) -> None:
    assert rule.code in {d.code for d in load_text(rule.bad).diagnostics}
    assert load_text(rule.good).diagnostics == []


@pytest.mark.parametrize("rule", OF_THE_PLANNER, ids=lambda rule: rule.code)
def test_examples_of_the_planner(rule: Rule) -> None:
    assert load_text(rule.bad).diagnostics == []
    found = [d for d in findings_of(rule.bad) if d.code == rule.code]
    assert len(found) == 1
    assert found[0].help


@pytest.mark.parametrize("rule", often(OF_THE_PLANNER, OF_THE_PLANNER[::6]), ids=lambda rule: rule.code)
def test_good_examples_of_the_planner(rule: Rule) -> None:
    sound = findings_of(rule.good)
    assert rule.code not in {d.code for d in sound}
    # PT620: an example names a folder that is not here.
    assert all(d.severity in ("warning", "note") for d in sound if d.code != "PT620")


@pytest.mark.parametrize("rule", often(PLANNED, PLANNED[1::5]), ids=lambda rule: rule.code)
def test_good_examples_can_be_planned(rule: Rule) -> None:
    # Some examples name placeholder files, or models that are too large for one machine.
    assert not {d.code for d in findings_of(rule.good) if d.severity == "error"} - {"PT251", "PT301", "PT601"}


def test_codes_are_unique_and_found_when_mistyped() -> None:
    listed = [rule.code for table in TABLES for rule in table.RULES]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(RULES)
    assert "PT204" in nearest("pt204x")


def test_every_code_is_documented_and_every_documented_code_is_raised() -> None:
    """Codes are written out where they are raised, as ``"PT203"`` or at the start of a message."""
    raised = set()
    for package in ("partool", "runtime", "kernels"):
        for path in (ROOT / package).rglob("*.py"):
            if not path.name.startswith("_texts"):
                raised |= set(re.findall(r'"(PT\d{3})(?:"|: )', path.read_text(encoding="utf-8")))
    assert raised - set(RULES) == set()
    assert set(RULES) - raised == set()
