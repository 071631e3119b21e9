"""``partool schedule``: schedules drawn, printed, checked and compared; errors name their place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from partool.cli.main import run
from partool.report.drawing import Window
from partool.report.terminal_timeline import _line, _Look
from partool.schedule import Action, TimedAction, cell, from_text, generate, to_text
from partool.strategies.schedules import SCHEDULES


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(capsys, monkeypatch)


class Call:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object, columns: int = 100) -> tuple[int, str, str]:
        self.monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as end:
            run(["schedule", *map(str, arguments)])
        shown = self.capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err


def test_every_schedule_is_listed_and_can_be_drawn(call: Call) -> None:
    code, out, _ = call()
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if not line.startswith(" ")][1:] == list(SCHEDULES)
    for name in SCHEDULES:
        code, out, err = call(name, "--ranks", 3, "--micro-batches", 6)
        assert (code, err) == (0, "")
        assert f"{name}, 3 ranks, 6 micro-batches:" in out


def boxes(line: str) -> list[str]:
    return re.findall(r"[FBIW]\d+", line)


def test_the_picture_is_the_list(call: Call) -> None:
    code, out, _ = call("1f1b", "--ranks", 3, "--micro-batches", 4)
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("rank ")]
    lists = generate("1f1b", 3, 4).lists
    assert [boxes(row) for row in rows] == [
        [f"{action.kind}{action.micro_batch}" for action in actions if action.kind in "FB"] for actions in lists
    ]
    assert all(len(row) <= 100 for row in rows)
    # (3 - 1) / (4 + 3 - 1) of the time are idle, rank 0 keeps three micro-batches
    assert "18 forward passes of a rank, ranks idle 33.3% of it" in out
    assert [re.search(r"(\d+)% idle, holds (\d)", row).groups() for row in rows] == [
        ("33", "3"),
        ("33", "2"),
        ("33", "1"),
    ]  # type: ignore[union-attr]
    # boxes are as wide as their time: 78 columns for 18 units
    width = len(rows[0]) - len("rank 0  ") - len(" 33% idle, holds 3")
    first = rows[0].index("B0") - len("rank 0 ")
    assert first / width == pytest.approx(7 / 18, abs=1.5 / width)


def test_a_long_step_shows_its_beginning_and_its_end(call: Call) -> None:
    code, out, _ = call("1f1b", "--ranks", 20, "--micro-batches", 200)
    assert code == 0
    first, last = out.split("the last part")
    for part in (first, last):
        assert re.findall(r"^ *rank (\d+) ", part, re.MULTILINE) == [str(rank) for rank in (*range(8), *range(12, 20))]
    assert "…" in first
    assert "F0" in first
    assert "B199" in last
    assert "B199" not in first


def test_lists_go_out_as_text_and_come_back(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine.csv"
    code, out, _ = call("hanayo", "--waves", 2, "--micro-batches", 5, "--output", "csv", "--out", path)
    assert code == 0
    schedule = generate("hanayo", 4, 5, 4)
    assert out == path.read_text() == to_text(schedule)
    assert from_text(out).lists == schedule.lists
    assert call("--check", path) == (0, "", f"{path}: the schedule is sound\n")
    code, out, _ = call(path, "--output", "json")
    data = json.loads(out)
    assert (data["ranks"], data["micro_batches"], data["stages_per_rank"]) == (4, 5, 4)
    assert data["messages"] == {"activations": 5 * 2 * 2 * 3, "gradients of activations": 5 * 2 * 2 * 3}
    assert len(data["hash"]) == 64


def test_a_trace_holds_every_action(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert call("zb-v", "--timeline", path)[0] == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 2 * 8 * 3
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == 2 * 8 * 3 * 2
    assert starts.keys() == ends.keys()
    assert all(starts[key]["ts"] < ends[key]["ts"] and starts[key]["tid"] != ends[key]["tid"] for key in starts)


def test_what_is_wrong_with_a_file_is_said_with_its_place(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    text = "# mine\n" + to_text(generate("1f1b", 2, 3))
    path.write_text(text)
    assert call("--check", path)[0] == 0
    path.write_text(text.replace("1RECV_F0,1F0,", "1RECV_F1,1F0,").replace("1RECV_F1,1F1", "1RECV_F0,1F1"))
    code, out, err = call("--check", path)
    assert (code, out) == (1, "")
    assert f"error[PT433]: {path}, row 3, cell 1: from rank 0 to 1" in err
    path.write_text(text.replace("1F2", "1X2"))
    code, _, err = call(path)
    assert code == 1
    assert re.search(rf"error\[PT432\]: {path}, row 3, cell \d+: '1X2' is no action", err)
    path.write_bytes(b"\xff\xfe\xfa")
    assert "PT432" in call(path)[2]
    assert "PT432" in call(tmp_path / "none.csv")[2]


def test_differences_are_told_with_exit_code_10(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(to_text(generate("1f1b", 4, 8)))
    assert call("1f1b", "--ranks", 4, "--diff", path)[0] == 0
    assert call(path, "--ranks", 4, "--diff", path)[0] == 2  # the sizes in the file are its own
    assert call(path, "--diff", path) == (0, "", "the schedules are the same\n")
    other = tmp_path / "other.csv"
    other.write_text(to_text(generate("1f1b", 4, 7)))
    code, out, _ = call(other, "--diff", path)
    assert code == 10
    assert out.startswith("micro-batches: 8 -> 7\n")
    code, out, _ = call("1f1b", "--diff", "zb-h1", "--output", "json")
    assert code == 10
    assert json.loads(out)["differences"]


def test_boxes_tell_their_stage_where_ranks_have_several(call: Call) -> None:
    """Boxes too narrow for their names still have edges, and no piped line ends in blanks."""
    for name in ("hanayo", "weipipe"):
        _, out, _ = call(name, "--ranks", 4, "--micro-batches", 4, columns=110)
        lists = generate(name, 4, 4, 2 if name == "hanayo" else 1).lists
        rows = [line for line in out.splitlines() if line.startswith("rank ")]
        # a box that is split over two lines appears twice
        shown = [list(dict.fromkeys(re.findall(r"(\d+[FB]\d)", "".join(rows[rank::4])))) for rank in range(4)]
        assert shown == [[cell(action) for action in actions if action.kind in "FB"] for actions in lists]
        assert "F3: of stage" in out
    _, out, _ = call("1f1b", "--ranks", 2, "--micro-batches", 4)
    assert not re.search(r"\d[FB]\d", out)
    assert "of stage" not in out
    assert not re.search(r" +$", out + call()[1] + call("zb-v", columns=70)[1], re.MULTILINE)


@pytest.mark.parametrize("colour", [False, True])
def test_narrow_boxes_keep_their_edges(colour: bool) -> None:
    boxes = [TimedAction(0, Action("F", 0, batch), batch, batch + 1.0) for batch in range(100, 120)]
    for width in (40, 60):
        look = _Look(colour, several=False, pale=frozenset())
        line = str(_line(boxes, Window("", 0.0 + 100, 120.0), width, look))
        assert line.count("▏" if colour else "|") == 20, line
        assert len(line) == width


def test_one_of_each_is_no_plural(call: Call) -> None:
    assert call("1f1b", "--ranks", 1, "--micro-batches", 1)[1].startswith("1f1b, 1 rank, 1 micro-batch: ")


def test_cells_of_lists_without_transfers_are_those_of_the_file(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,,1F1,1B1,1F9,1B2\n")
    code, _, err = call("--check", path)
    assert code == 1
    assert err == (
        f"error[PT433]: {path}, row 2, cell 6: 1F9: there are only micro-batches 0 to 2\n"
        f"error[PT433]: {path}, row 2: 1F2 is missing\n"
        f"{path}: not sound; partool explain PT433\n"
    )


@pytest.mark.parametrize("arguments", [["--check"], ["--check", ""], [""], ["--diff", "1f1b"], ["", "--diff", "1f1b"]])
def test_nothing_to_check_is_a_wrong_command(call: Call, arguments: list[str]) -> None:
    """No arguments, as when a script's variable is empty, must not pass for a valid schedule."""
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "which schedule" in err


def test_a_named_schedule_is_compared_at_the_sizes_of_the_file(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    for name, chunks in (("1f1b", 1), ("hanayo", 4), ("interleaved", 3)):
        path.write_text(to_text(generate(name, 2, 6, chunks)))
        assert call(path, "--diff", name) == (0, "", "the schedules are the same\n")
        assert call(name, "--diff", path) == (0, "", "the schedules are the same\n")
    code, out, _ = call(path, "--diff", "gpipe")
    assert code == 10
    assert "micro-batches" not in out
    code, out, _ = call(path, "--diff", "interleaved", "--micro-batches", 4)
    assert code == 10
    assert out.startswith("micro-batches: 4 -> 6")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["hanay", "--ranks", 2], 2, "did you mean hanayo?"),
        (["nothing-like-it"], 2, "known: gpipe"),
        (["interleaved", "--micro-batches", 6], 1, "--micro-batches 8"),
        (["1f1b", "--chunks", 2], 1, "one stage per rank, not 2"),
        (["1f1b", "--waves", 2], 2, "--waves belongs to hanayo"),
        (["hanayo", "--waves", 2, "--chunks", 4], 2, "--waves belongs to hanayo"),
        (["1f1b", "--in-flight", 2], 1, "cannot be bounded"),
        (["1f1b", "--in-flight", 2], 1, "help: leave out --in-flight; zb-v and hanayo take it"),
        (["1f1b", "--chunks", 2], 1, "help: leave out --chunks; interleaved"),
        (["hanayo", "--chunks", 3], 1, "help: --chunks 2 or 4"),
        (["hanayo", "--chunks", 1], 1, "help: --waves 1"),
        (["zb-v", "--chunks", 3], 1, "help: --chunks 2"),
        (["1f1b", "--ranks", 0], 2, "--ranks"),
    ],
)
def test_sizes_that_cannot_be_are_refused(call: Call, arguments: list[str], code: int, words: str) -> None:
    found, out, err = call(*arguments)
    assert (found, out) == (code, "")
    assert words in " ".join(err.replace("│", " ").split())
