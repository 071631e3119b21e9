"""``partool compare``: runs of other lengths, crashed, running, of an older version, without plan or log."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from _histories import BEGAN, EventRow, end, run_folder, start, steps, validation, write_log
from _telemetry import small_plan
from test_report_curves import home, resumed, shown
from test_report_html import Page

__all__ = ["home"]
OLD = Path(__file__).parents[2] / "data" / "old-form"


def spec(**training: object) -> dict[str, object]:
    return {"name": "small", "training": {"steps": 12, **training}, "optimizer": {"lr": 1e-3}}


@pytest.fixture
def runs(home: Path) -> list[str]:
    """One of 12 steps, a crashed one in three attempts, one that runs, one of version 1, one without anything."""
    long = [
        start(),
        *steps(1, 12),
        validation(6, 3.5, BEGAN + 12),
        validation(12, 4.0, BEGAN + 24),
        end(12, BEGAN + 24),
    ]
    run_folder(home, "long-20260101-000000-aaaa", long, small_plan(spec=spec()).to_json())
    changed = small_plan(spec=spec(global_batch=20) | {"optimizer": {"lr": 2e-3, "name": "lion"}}).to_json()
    run_folder(home, "crashed-20260101-000000-bbbb", resumed(), changed, state="failed", reason="killed")
    running = [start(), *steps(1, 3)]
    folder = run_folder(home, "running-20260101-000000-cccc", running, small_plan(spec=spec()).to_json(), ended=None)
    (folder / "status.json").unlink()
    old = Path(shutil.copytree(OLD, home / "runs" / "old-form-20261123-032017-c26f"))
    empty = run_folder(home, "empty-20260101-000000-dddd", [], None, state="failed", reason="no GPU")
    return [folder.name for folder in (home / "runs" / "long-20260101-000000-aaaa",)] + [
        "crashed", str(folder), old.name, empty.name[:8],
    ]  # fmt: skip


def test_every_kind_of_run_is_set_beside_the_others(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = shown(capsys, "compare", *runs, "--html", tmp_path / "c.html")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert "note: no plan.json, so its spec is not compared" in text
    assert "note: no event log here" in text
    assert re.search(r"training\.global_batch 1 3: not set 2: 20 4: 4", text)
    assert re.search(r'optimizer\.name 1 3 4: not set 2: "lion"', text)
    assert re.search(r"steps +12 +7 +3 +4 +0$", out, re.MULTILINE)
    assert re.search(r"state +done +failed +unknown +done +failed$", out, re.MULTILINE)
    assert re.search(r"final loss +4\.8800 +8\.9300 +4\.9700 +5\.3718 +–$", out, re.MULTILINE)
    assert re.search(r"best validation +3\.5000 +– ", out)
    assert re.search(r"device-hours +0\.0133 +0\.0189 +0\.00333 ", out)
    assert "training loss" in out
    for axis, unit in (("tokens", "over tokens"), ("time", "over time (s)")):
        assert f"training loss {unit}" in shown(capsys, "compare", *runs, "--over", axis)[1]
    check_page((tmp_path / "c.html").read_text())


def check_page(source: str) -> None:
    page = Page(source)
    assert set(re.findall(r"url\((.)", source)) <= {"#"}
    assert [a for _, a in page.elements if "src" in a or (a.get("href") or "data:")[:5] != "data:"] == []
    svgs = [str(svg["id"]) for svg in page.of("svg")]
    assert svgs == [
        f"curves-{chart}-{axis}" for axis in ("steps", "tokens", "time") for chart in ("loss", "validation_loss")
    ]
    lines = [str(group["data-words"])[0] for group in page.of("g") if "data-words" in group]
    assert "".join(lines) == "12341" * 3
    assert [box["id"] for box in page.of("input")] == ["over-steps", "over-tokens", "over-time"]
    assert all(f"#over-{axis}:checked ~ .over-{axis}" in source for axis in ("steps", "tokens", "time"))


def test_data_hold_figures_and_raw_values(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(shown(capsys, "compare", *runs, "--output", "json")[1])
    results = [each["result"] for each in data["runs"]]
    assert [result["steps"] for result in results] == [12, 7, 3, 4, 0]
    assert results[0]["validation_step"] == 6
    assert results[1]["device_hours"] == pytest.approx(68 / 3600)
    assert results[4]["loss"] is None
    assert data["runs"][0]["curves"]["loss"]["last"] == {"step": 12, "value": pytest.approx(4.88)}
    rows = {row["key"]: row["values"] for row in data["spec_differences"]}
    assert rows["training.global_batch"] == [None, 20, None, 4, None]
    assert rows["optimizer.lr"] == [0.001, 0.002, 0.001, 0.001, None]
    assert "training.steps" in rows  # 12 and 4


def of_sets(step: int, **losses: float) -> EventRow:
    kind, at, data = validation(step, sum(losses.values()) / len(losses), BEGAN + 2 * step)
    sets = {name: {"loss": loss, "perplexity": 2.0, "tokens": 8} for name, loss in losses.items()}
    return kind, at, data | {"sets": sets}


def test_named_sets_have_curves_and_rows(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that some of the runs lack, and names that do not fit a column."""
    long = "recipes-of-northern-countries"
    plan = small_plan(spec=spec()).to_json()
    first = [start(), *steps(1, 12), of_sets(6, code=3.25, **{long: 2.5}), of_sets(12, code=3.5, **{long: 2.0})]
    run_folder(home, "first-20260101-000000-aaaa", first, plan)
    run_folder(home, "other-20260101-000000-bbbb", [start(), *steps(1, 12), of_sets(12, code=1.125)], plan)
    code, out, _ = shown(capsys, "compare", "first", "other", "--html", home / "c.html")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for title in ("validation loss of code", f"validation loss of {long}"):
        assert title in out
    assert re.search(r"best code +3\.2500 +1\.1250$", out, re.MULTILINE)
    assert re.search(r"2\.0000 +–$", out, re.MULTILINE)
    results = [
        each["result"] for each in json.loads(shown(capsys, "compare", "first", "other", "--output", "json")[1])["runs"]
    ]
    assert results[0]["validation_sets"] == {"code": {"loss": 3.25, "step": 6}, long: {"loss": 2.0, "step": 12}}
    assert results[1]["validation_sets"] == {"code": {"loss": 1.125, "step": 12}}
    source = (home / "c.html").read_text()
    page = Page(source)
    charts = [str(svg["id"]).removesuffix("-steps") for svg in page.of("svg") if str(svg["id"]).endswith("-steps")]
    assert charts[2:] == ["curves-validation_set_code", f"curves-validation_set_{long}"]
    assert f"Best {long}</th>" in source
    many = {f"set{number}": 1.0 + number for number in range(7)}
    folder = run_folder(home, "many-20260101-000000-cccc", [start(), *steps(1, 12), of_sets(12, **many)], plan)
    assert "--html F draws the losses of 5 more sets." in shown(capsys, "compare", "first", folder)[1]


def test_what_cannot_be_compared_is_refused(runs: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = shown(capsys, "compare", runs[0])
    assert (code, "error[PT535]: 1 run given" in err) == (2, True)
    assert "error[PT535]: 21 runs given" in shown(capsys, "compare", *["x"] * 21)[2]
    code, _, err = shown(capsys, "compare", "long", home / "runs" / runs[0])
    assert (code, "error[PT536]" in err, f"are both the run {runs[0]}" in err) == (2, True, True)
    assert "error[PT502]" in shown(capsys, "compare", "long", "nothing")[2]


def test_equal_specs_damage_and_names_with_markup(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = small_plan(spec=spec()).to_json()
    names = [f"<script>{letter}-20260101-000000-aaaa" for letter in "ab"]
    folders = [run_folder(home, name, [start(), *steps(1, 3)], plan) for name in names]
    log = write_log(folders[1], [start(), *steps(1, 3)])
    log.write_text(log.read_text().replace('"step": 2', '"step": "two"'))
    (folders[0] / "plan.json").write_text("{")
    code, out, _ = shown(capsys, "compare", *names, "--html", home / "c.html")
    text = " ".join(out.split())
    assert (code, "note: some of its events are damaged and left out" in text) == (0, True)
    assert "its plan.json cannot be read" in text
    assert "Fewer than two of the runs have a spec here" in text
    source = (home / "c.html").read_text()
    assert len(Page(source).of("script")) == 1
    (folders[0] / "plan.json").write_text(plan)
    assert "Nothing: the specs are equal." in shown(capsys, "compare", *names)[1]


def test_twenty_runs_fit_80_columns(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"run-{number:02}-{'x' * 40}" for number in range(20)]
    for number, name in enumerate(names):
        run_folder(home, name, [start(), *steps(1, 2 + number)], small_plan(spec=spec(steps=number)).to_json())
    code, out, _ = shown(capsys, "compare", *names, "--html", home / "c.html")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert len(re.findall(r"^  device-hours", out, re.MULTILINE)) == 4
    assert 'class="curve s9 dashed"' in (home / "c.html").read_text()
