"""The figures of docs/guide/pipelines.md are those of the schedules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partool.report.schedule import in_units, messages
from partool.schedule import StageTimes, from_text, generate, nearest, problems, simulate, to_text
from partool.strategies.schedules import SCHEDULES

PAGE = (Path(__file__).parents[3] / "docs/guide/pipelines.md").read_text(encoding="utf-8")
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


def test_problems_of_files_read_as_the_page_says() -> None:
    """The cell to blame, what is missing, and two messages in the wrong order."""
    text = to_text(generate("1f1b", 2, 4))
    sends = ("0SEND_F1,0RECV_B0,0B0,0F2,0SEND_F2,", "0SEND_F2,0RECV_B0,0B0,0F2,0SEND_F1,")
    told = []
    for change in (("1F2", "1F9"), sends):
        assert change[0] in text
        for problem in problems(from_text(text.replace(*change, 1))):
            place = f"row {problem.rank + 1}" + (f", cell {problem.at + 1}" if problem.at >= 0 else "")
            told.append(f"error[PT433]: my.csv, {place}: {problem.message}")
    assert re.findall(r"^    (error.*)$", PAGE, re.MULTILINE) == told


def idle(name: str, chunks: int, eighths: list[float], share: float) -> float:
    """Return the idle share of ranks where W is a share of backward passes, and parts of the model differ."""
    schedule = generate(name, 4, 8, chunks)
    size = 8 // schedule.stages
    forward = [sum(eighths[size * stage : size * (stage + 1)]) for stage in range(schedule.stages)]
    backward = [2 * each for each in forward]
    timeline = simulate(schedule, StageTimes(forward, backward, [share * each for each in backward], 0.0))
    return 1.0 - sum(timeline.busy_s) / (4 * timeline.makespan_s)


def test_zb_v_idles_least_only_with_equal_times() -> None:
    (words,) = re.findall(r"^\* \*\*ZB-V\*\*.*?(?=^\*)", PAGE, re.MULTILINE | re.DOTALL)
    figures = [float(figure) for figure in re.findall(r"0\.\d{3}", words)]
    even, uneven = [1.0] * 8, [1.5, *[1.0] * 6, 2.0]
    assert figures == pytest.approx(
        [
            idle("zb-v", 2, even, 0.3),
            idle("interleaved", 2, even, 0.3),
            idle("zb-v", 2, uneven, 0.5),
            idle("zb-h1", 1, uneven, 0.5),
        ],
        abs=6e-4,
    )
    assert idle("zb-v", 2, even, 0.5) < min(idle("zb-h1", 1, even, 0.5), idle("interleaved", 2, even, 0.5))
