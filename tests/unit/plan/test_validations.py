"""The record of validations: what is the best, and for how long nothing has improved."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from partool.plan.validations import Validations, read_validations, write_validations
from partool.spec.judging import BestSpec, EarlyStop


def record(*losses: float, first: int = 10) -> Validations:
    made = Validations()
    for place, loss in enumerate(losses):
        made = made.noted(first * (place + 1), {"loss": loss, "accuracy": loss})
    return made


def test_the_best_are_those_with_a_checkpoint_and_ties_go_to_the_earlier() -> None:
    rows = record(3.0, 2.0, 2.0, math.nan, 1.0)
    assert rows.best(BestSpec(), 2, [10, 20, 30, 40]) == [20, 30]
    assert rows.best(BestSpec(), 9, [10, 20, 30, 40, 50]) == [50, 20, 30, 10]
    assert rows.best(BestSpec(metric="accuracy"), 1, [10, 20]) == [10]
    assert rows.best(BestSpec(mode="max"), 1, [10, 20]) == [10]
    assert rows.best(BestSpec(metric="kl"), 1, [10, 20]) == []


@pytest.mark.parametrize(
    ("losses", "stop", "count"),
    [
        ((), {}, 0),
        ((3.0, 2.0, 1.0), {}, 0),
        ((3.0, 2.0, 2.0, 2.5), {}, 2),
        ((3.0, 2.9, 2.8, 2.7), {"min_delta": 0.15}, 1),  # two small changes make one that counts
        ((3.0, math.nan, math.inf), {}, 2),
        ((math.nan, 3.0), {}, 0),
        ((1.0, 2.0, 1.5), {"metric": "accuracy"}, 1),
    ],
)
def test_patience_counts_validations_without_an_improvement(
    losses: tuple[float, ...], stop: dict[str, object], count: int
) -> None:
    assert record(*losses).without_improvement(EarlyStop.model_validate(stop)) == count


def test_a_run_that_goes_on_earlier_forgets_later_rows(tmp_path: Path) -> None:
    assert read_validations(tmp_path) == Validations()
    rows = record(3.0, 2.0, 1.0).model_copy(update={"ended": "early stop"})
    write_validations(tmp_path, rows)
    assert read_validations(tmp_path) == rows
    assert rows.until(20) == record(3.0, 2.0)
    assert rows.noted(20, {"loss": 7.0}).rows[-1].figures == {"loss": 7.0}
    assert [row.step for row in rows.noted(20, {"loss": 7.0}).rows] == [10, 20]
    assert [path.name for path in tmp_path.iterdir()] == ["validations.json"]
