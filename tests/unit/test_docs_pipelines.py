"""The figures of docs/pipelines.md are those of the schedules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partool.report.schedule import in_units, messages
from partool.schedule import SCHEDULES, generate, nearest

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z0-9-]+)`(?:, (\d) (?:chunks|waves?))? \|((?: [\d.]+ \|){5})$", re.MULTILINE)


def rows() -> list[tuple[str, int, list[float]]]:
    found = []
    for name, count, figures in ROW.findall(PAGE):
        chunks = int(count or 1) * (2 if name == "hanayo" else 1)
        found.append((name, 2 if name == "zb-v" else chunks, [float(f) for f in figures.strip(" |").split(" | ")]))
    return found


def test_the_table_has_every_schedule_that_moves_activations() -> None:
    assert {name for name, _, _ in rows()} == {name for name, it in SCHEDULES.items() if it.moves == "activations"}


@pytest.mark.parametrize(("name", "chunks", "figures"), rows())
def test_figures(name: str, chunks: int, figures: list[float]) -> None:
    few, some, many = (in_units(generate(name, 4, m, chunks)) for m in (4, 8, 32))
    assert [few.bubble, some.bubble, many.bubble] == pytest.approx(figures[:3], abs=6e-4)
    assert max(some.in_flight) / chunks == figures[3]
    assert sum(messages(generate(name, 4, 8, chunks)).values()) == figures[4]


def test_which_numbers_of_micro_batches_they_take() -> None:
    of_names = dict(re.findall(r"^\| `([a-z0-9-]+)`.*? \| [^|]+ \| (any|multiple of)[^|]*\|", PAGE, re.MULTILINE))
    assert len(of_names) == 8  # weipipe and weipipe-naive share a row
    for name, takes in of_names.items():
        chunks = {"interleaved": 2, "zb-v": 2, "hanayo": 2}.get(name, 1)
        assert (nearest(name, 4, 7, chunks) == 7) == (takes == "any")
        assert SCHEDULES[name].split == ("halved" in re.search(rf"^\| `{name}`.*$", PAGE, re.MULTILINE)[0])  # type: ignore[index]
