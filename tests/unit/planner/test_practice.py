"""Plans that an engineer would run: layouts of published practice, or better by score."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from _golden import fixed_machine
from _practice import CASES, RECORD, record_of

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    with fixed_machine():
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if case.long else []) for name, case in CASES.items()]
)
def test_a_plan_of_published_training_stays(name: str) -> None:
    found, recorded = record_of(CASES[name]), RECORDED[name]
    assert found.keys() == recorded.keys()
    for key, value in found.items():
        assert value == (pytest.approx(recorded[key], rel=1e-9) if isinstance(value, float) else recorded[key]), key


@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_that_of_practice_or_has_a_better_score(name: str) -> None:
    """Where the plan differs from practice, the case says why, and practice's layout has no better score."""
    case, record = CASES[name], RECORDED[name]
    assert record["agrees"] == (not case.why_not), (record["layout"], case.why_not)
    if not record["agrees"]:
        fits = record["practice_layout"] != "does not fit"
        assert not fits or record["practice_score_s"] > record["score_s"]


def test_there_are_as_many_cases_as_promised() -> None:
    assert len(CASES) >= 25
