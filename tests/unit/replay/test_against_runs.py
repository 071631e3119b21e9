"""``partool plan --against-runs``: rows whose errors are known by construction, and files that are no tables."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from partool.catalog.profile_file import Figure, MachineId, MeasuredFigures, Profile, load_profile, save_profile
from partool.cli.main import run
from partool.plan.run_rows import COLUMNS
from partool.replay.cases import case_of
from partool.replay.cells import Cells
from partool.replay.predicted import memory_result, time_result
from partool.replay.table import RunTableError, read_table

ROOT = Path(__file__).parents[3]
HEADER = [*COLUMNS, "stack", "compile", "reading_kind", "fits"]
BASE = {
    "source": "ours", "stack": "megatron", "model": "llama3-8b", "seq_len": "4096", "gpu": "h100-sxm", "n_gpus": "8",
    "gpus_per_node": "8", "dtype": "bf16", "dp": "8", "tp": "1", "pp": "1", "zero_or_fsdp": "ZeRO-1",
    "recompute": "none", "micro_batch": "1", "global_batch": "64",
}  # fmt: skip
PIPED = {"dp": "4", "pp": "2", "vpp_or_schedule": "1f1b"}


def measured(time: float | None = None, memory: float | None = None, **changes: str) -> dict[str, str]:
    """Return a row that measured these multiples of its predictions."""
    row = {**BASE, **changes}
    case = case_of(Cells({**row, "step_time_s": "1", "peak_mem_gib": "1"}))
    if time is not None:
        timed = time_result(case)
        assert timed is not None
        row["step_time_s"] = f"{timed.predicted * time:.9g}"
    if memory is not None:
        peak = memory_result(case)
        assert peak is not None
        row["peak_mem_gib"] = f"{peak.predicted * memory / 2**30:.9g}"
    return row


def written(path: Path, rows: Sequence[Mapping[str, str]], header: Sequence[str] = HEADER) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return (ended.value.code if isinstance(ended.value.code, int) else 0), out, err


def data(capsys: pytest.CaptureFixture[str], file: Path, *arguments: object) -> dict[str, Any]:
    code, out, err = call(capsys, "--against-runs", file, "--output", "json", *arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_errors_are_those_that_were_put_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Measured at 1, 1.25 and 2 times the prediction: errors of 0, -20 and -50 %."""
    rows = [measured(time, 1 / time, source=f"of {time}") for time in (1.0, 1.25, 2.0)]
    found = data(capsys, written(tmp_path / "runs.csv", rows))
    assert (found["rows"], found["priced"], found["unread"]) == (3, 3, [])
    for metric, errors in (("time", [0.0, -0.2, -0.5]), ("memory", [0.0, 0.25, 1.0])):
        here = [row for row in found["results"] if row["metric"] == metric]
        assert [row["error"] for row in here] == pytest.approx(errors, abs=1e-6)
        (stack,) = found[metric]["stack"]
        assert (stack["name"], stack["rows"], stack["stated"], stack["worst_line"]) == ("megatron on h100-sxm", 3, 3, 4)
        assert [stack[name] for name in ("bias", "median", "worst")] == pytest.approx(
            [errors[1], abs(errors[1]), errors[2]], abs=1e-6
        )
        assert {one["name"]: one["rows"] for one in found[metric]["source"]} == {"of 1.0": 1, "of 1.25": 1, "of 2.0": 1}
        assert [one["name"] for one in found[metric]["mechanism"]] == ["data"]


def test_a_row_that_took_half_longer_is_told_in_the_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = written(tmp_path / "runs.csv", [measured(1 / 1.5), measured(1.0)])
    code, out, err = call(capsys, "--against-runs", file, "--out", tmp_path / "errors.json", "--breakdown")
    assert (code, err) == (0, "")
    all_rows = next(line for line in out.splitlines() if line.strip().startswith("all "))
    assert all_rows.split() == ["all", "2", "2", "+25.0%", "25.0%", "+50.0%", "2"]
    assert re.search(r"line 2 .* \+50\.0%  megatron on h100-sxm: data", out)
    assert json.loads((tmp_path / "errors.json").read_text())["results"][0]["error"] == pytest.approx(0.5)


@pytest.mark.parametrize(("factor", "side"), [(1 / 0.6, "40 % too fast"), (0.5, "100 % too slow")])
def test_the_mechanism_that_is_off_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, factor: float, side: str
) -> None:
    """More rows have the mechanism than not, and they have others as well."""
    rows = [measured(1.0, global_batch=batch, dp=dp, tp=tp) for batch, dp, tp in (
        ("64", "8", "1"), ("128", "8", "1"), ("64", "4", "2"), ("128", "4", "2"))]  # fmt: skip
    rows += [measured(factor, global_batch=batch, **PIPED) for batch in ("64", "128", "256")]
    rows += [measured(factor, global_batch=batch, **PIPED | {"dp": "2", "tp": "2"}) for batch in ("64", "128", "256")]
    found = data(capsys, written(tmp_path / "runs.csv", rows))
    (off,) = found["off"]
    assert (off["names"], off["rows"], off["family"], off["assumed"]) == (["pipeline"], 6, "megatron", 0)
    assert off["error"] == pytest.approx(1 / factor - 1, abs=1e-6)
    assert off["others"] == pytest.approx(0.0, abs=1e-6)
    assert off["text"].startswith(f"pipelines are predicted {side} (n = 6; megatron; stated error ")


def test_errors_within_what_is_stated_are_of_no_mechanism(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [measured(1.0, global_batch=batch) for batch in ("64", "128", "256")]
    rows += [measured(1.04, global_batch=batch, **PIPED) for batch in ("64", "128", "256")]
    assert data(capsys, written(tmp_path / "runs.csv", rows))["off"] == []


def test_an_error_of_all_rows_is_of_no_mechanism(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [measured(2.0, 2.0, global_batch=batch, **how) for batch in ("64", "128", "256") for how in ({}, PIPED)]
    found = data(capsys, written(tmp_path / "runs.csv", rows))
    assert {(off["metric"], *off["names"], off["rows"]) for off in found["off"]} == {("memory", 6), ("time", 6)}
    assert next(off for off in found["off"] if off["metric"] == "time")["text"].startswith(
        "rows of any layout are predicted 50 % too fast (n = 6; "
    )


def test_few_rows_among_many_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Forty rows err by up to 10 % in either direction, three more with shared sequences take 60 % longer."""
    rows = [measured(1.0 + 0.01 * (number % 21 - 10), global_batch=str(8 * number)) for number in range(8, 48)]
    rows += [measured(1.6, global_batch=batch, dp="4", cp="2") for batch in ("64", "128", "256")]
    (off,) = data(capsys, written(tmp_path / "runs.csv", rows))["off"]
    assert (off["names"], off["rows"]) == (["sequence"], 3)


def test_each_of_two_mechanisms_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rows with both do not count for the second; rows with the first alone, and with the second alone, tell."""
    batches = ("64", "128", "256")
    rows = [measured(1.0, global_batch=batch) for batch in batches]
    rows += [measured(2.5, global_batch=batch, **PIPED) for batch in batches]
    rows += [measured(1.6, global_batch=batch, dp="4", cp="2") for batch in batches]
    found = data(capsys, written(tmp_path / "runs.csv", rows))["off"]
    assert [(off["names"], round(off["error"], 3)) for off in found] == [(["pipeline"], -0.6), (["sequence"], -0.375)]


def test_two_mechanisms_of_the_same_rows_are_named_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [measured(1.0, global_batch=batch) for batch in ("64", "128", "256")]
    both = {"dp": "2", "tp": "2", "pp": "2", "vpp_or_schedule": "1f1b"}
    rows += [measured(2.0, global_batch=batch, **both) for batch in ("64", "128", "256")]
    (off,) = data(capsys, written(tmp_path / "runs.csv", rows))["off"]
    assert off["names"] == ["tensor", "pipeline"]
    assert off["text"].startswith("tensor parallelism or pipelines are predicted 50 % too fast")


def test_scalars_are_recovered_and_written_only_when_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four rows whose median is 1.2 in time and 0.9 in memory; the open row and the other code base do not count."""
    times = {"64": 1.2, "128": 1.2, "256": 5.0, "512": 1.0}
    rows = [measured(time, 0.9, global_batch=batch) for batch, time in times.items()]
    rows += [measured(9.0, global_batch="64", recompute="", micro_batch=""), measured(3.0, stack="deepspeed")]
    file = written(tmp_path / "runs.csv", rows)
    found = data(capsys, file)
    megatron = next(one for one in found["scalars"] if one["stack"] == "megatron")
    assert (megatron["rows"], megatron["open_rows"], megatron["engines"]) == (4, 1, ["megatron"])
    assert megatron["time"]["value"] == pytest.approx(1.2, rel=1e-6)
    assert (megatron["time"]["n"], megatron["memory"]["value"]) == (4, pytest.approx(0.9, rel=1e-6))
    assert next(one for one in found["scalars"] if one["stack"] == "deepspeed")["time"] is None
    home = tmp_path / "home"
    assert not home.exists()
    code, _, err = call(capsys, "--against-runs", file)
    assert (code, home.exists()) == (0, False)
    assert f"--calibrate would write {home / 'calibration.json'}: scalars of megatron on h100-sxm" in err
    code, _, err = call(capsys, "--against-runs", file, "--calibrate")
    assert code == 0
    assert f"wrote {home / 'calibration.json'}" in err
    profile = load_profile(home / "calibration.json")
    time = profile.scalar("megatron").time
    assert time is not None
    assert time.value == pytest.approx(1.2, rel=1e-6)


def test_plans_use_the_scalars_of_their_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "model: llama3-8b\nhardware: {accelerator: h100-sxm, per_node: 8}\nengine: megatron\n"
        "data: {source: synthetic}\n"
        "training: {sequence_length: 4096, global_batch: 64, steps: 10, precision: bf16}\n"
        "parallel: {data: {zero: 1}, tensor: 2, micro_batch: 1, recompute: full}\n"
    )

    def planned(engine: str) -> float:
        code, out, err = call(capsys, spec, "--set", f"engine={engine}", "--output", "json")
        assert code == 0, err
        return float(json.loads(out)["prediction"]["time"]["step_time_s"])

    before = {engine: planned(engine) for engine in ("megatron", "deepspeed")}
    file = written(tmp_path / "runs.csv", [measured(1.5, global_batch=batch) for batch in ("64", "128", "256")])
    assert call(capsys, "--against-runs", file, "--calibrate")[0] == 0
    after = {engine: planned(engine) for engine in ("megatron", "deepspeed")}
    assert after["megatron"] == pytest.approx(1.5 * before["megatron"], rel=0.02)
    assert after["deepspeed"] == before["deepspeed"]


def test_measured_figures_and_other_devices_keep_their_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Scalars belong to the catalog's figures, and a calibration to one device."""
    home = tmp_path / "home"
    figures = MeasuredFigures(operator_s=Figure(value=1e-6, unit="s", n=3, mad=0.0))
    mine = Profile(
        partool_version="1", created="2026", complete=True, machine=MachineId(accelerator="h100-sxm"), figures=figures
    )
    save_profile(mine, home / "calibration.json")
    rows = [
        measured(1.5, gpu=gpu, global_batch=batch) for gpu in ("h100-sxm", "h200") for batch in ("64", "128", "256")
    ]
    file = written(tmp_path / "runs.csv", rows)
    code, _, err = call(capsys, "--against-runs", file, "--calibrate")
    assert (code, load_profile(home / "calibration.json")) == (0, mine)
    for name in ("h100-sxm", "h200"):
        profile = load_profile(home / f"calibration-{name}.json")
        assert (profile.machine.accelerator, profile.scalar("megatron").time is None) == (name, False)
        assert f"hardware: {{profile: {home / f'calibration-{name}.json'}}}" in err


def test_other_scalars_of_the_file_stay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for factor, stack in ((1.5, "megatron"), (2.0, "deepspeed"), (3.0, "megatron")):
        rows = [measured(factor, stack=stack, global_batch=batch) for batch in ("64", "128", "256")]
        assert call(capsys, "--against-runs", written(tmp_path / "runs.csv", rows), "--calibrate")[0] == 0
    profile = load_profile(tmp_path / "home/calibration.json")
    values = {scalars.stack: scalars.time.value for scalars in profile.scalars if scalars.time}
    assert values == pytest.approx({"deepspeed": 2.0, "megatron": 3.0}, rel=1e-6)


def test_rows_that_cannot_be_read_are_listed_with_line_and_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One of the cells holds two lines, so that lines are counted as an editor does."""
    wrong = {
        "two\nlines": {"micro_batch": "two"}, "b": {"step_time_s": "3,5"}, "c": {"dp": "4"}, "d": {"gpu": "TPU v4"},
        "e": {"stack": "mosaic"}, "f": {"dtype": "foo"}, "g": {"step_time_s": "", "peak_mem_gib": ""},
        "h": {"micro_batch": "1.5"}, "i": {"step_time_s": "-3"}, "j": {"ep": "16"}, "k": {"zero_or_fsdp": "yes"},
        "l": {"step_time_s": "0"}, "m": {"step_time_s": "nan"}, "n": {"method": "LoRA"}, "o": {"gpu": "cpu"},
        "p": {"vpp_or_schedule": "zb-v"}, "q": {"step_time_s": "1e999"},
    }  # fmt: skip
    header = [*HEADER, "method"]
    rows = [
        measured(1.0),
        *({**measured(1.0), "source": name, **cells} for name, cells in wrong.items()),
        measured(1.0),
    ]
    file = written(tmp_path / "runs.csv", rows, header)
    with file.open("a", encoding="utf-8") as more:
        more.write("\n" + "a,b,c\n")
    found = data(capsys, file)
    assert (found["rows"], found["priced"]) == (len(rows) + 1, 2)
    reasons = {row["line"]: row["reason"] for row in found["unread"]}
    patterns = (
        "micro_batch is 'two'", "step_time_s is '3,5', not a positive number; commas", "is 4, n_gpus is 8",
        "unknown device 'TPU v4'", "unknown stack 'mosaic': .*megatron", "dtype is 'foo'", "nothing was measured",
        "micro_batch is 1.5, not a whole", "step_time_s is '-3'", "ep is 16", "zero_or_fsdp is 'yes'",
        "step_time_s is 0, not", "step_time_s is 'nan'", "tuning of few parameters", "CPUs", "schedule zb-v",
        "step_time_s is 1e999, not", f"it has 3 cells, the header {len(header)}",
    )  # fmt: skip
    lines = [3, *range(5, 21), 23]
    assert list(reasons) == lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.search(pattern, reasons[line]), (line, reasons[line])
    _, out, _ = call(capsys, "--against-runs", file)
    assert "Left out: 18 rows" in out
    assert "line 3: micro_batch is 'two', not a positive number" in out


def test_many_lines_of_one_reason_are_cut_and_listed_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [measured(1.0), *({**measured(1.0), "gpu": "TPU"} for _ in range(30))]
    file = written(tmp_path / "runs.csv", rows)
    assert "22 and 10 more (--breakdown lists all): unknown device" in call(capsys, "--against-runs", file)[1]
    assert "31, 32: unknown device" in call(capsys, "--against-runs", file, "--breakdown")[1]


def test_misspelled_columns_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    header = [{"recompute": "recomputation"}.get(name, name) for name in HEADER]
    found = data(capsys, written(tmp_path / "runs.csv", [measured(1.0)], [*header, "colour"]))
    assert found["ignored_columns"] == ["recomputation (did you mean recompute?)", "colour"]


def test_runs_out_of_memory_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = {**BASE, "model": "llama3-70b", "fits": "no"}
    found = data(capsys, written(tmp_path / "runs.csv", [row, measured(1.0)]))
    assert (found["out_of_memory"], found["unread"]) == ([{"line": 2, "verdict": "red"}], [])


GOOD = ",".join(HEADER).encode() + b"\n"
BAD: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "PT286", "is empty"),
    "blank": (b" \n\n", "PT286", "is empty"),
    "binary": (b"PK\x03\x04\x00\x00", "PT286", "is no text: byte 5 is 0"),
    "Latin-1": (GOOD + "ours,,,,,,,,,,,,Zürich".encode("latin-1"), "PT286", "not in UTF-8: line 2"),
    "semicolons": (GOOD.replace(b",", b";"), "PT286", "separated by semicolons"),
    "tabs": (GOOD.replace(b",", b"\t"), "PT286", "separated by tabs"),
    "no rows": (GOOD, "PT286", "a header and no rows"),
    "open quote": (GOOD + b'"ours,megatron\n', "PT286", "no CSV: line 2"),
    "twice": (GOOD.replace(b"year", b"gpu"), "PT286", "same name: gpu"),
    "JSON": (b'{"runs": [1, 2]}\n', "PT287", "lacks columns"),
    "no devices": (GOOD.replace(b"gpu,n_gpus", b"GPU,n_gpus"), "PT287", "lacks columns of a table of runs: gpu \\("),
    "nothing usable": (
        GOOD + b"," * (len(HEADER) - 1) + b"\n" + b"x," * (len(HEADER) - 1) + b"x\n",
        "PT288",
        "none of",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    content, code, words = BAD[name]
    (tmp_path / "runs.csv").write_bytes(content)
    ended, out, err = call(capsys, "--against-runs", tmp_path / "runs.csv")
    assert ended == 1
    assert f"error[{code}]" in err
    assert re.search(words, err)
    assert (code == "PT288") == bool(out)


def test_places_that_are_no_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none.csv"):
        code, _, err = call(capsys, "--against-runs", place)
        assert (code, "error[PT286]" in err) == (1, True)


def test_nothing_is_written_without_scalars(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = written(tmp_path / "runs.csv", [measured(1.5)])
    code, _, err = call(capsys, "--against-runs", file, "--calibrate")
    assert (code, "error[PT288]" in err, (tmp_path / "home").exists()) == (1, True, False)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--calibrate"], ["spec.yaml", "--calibrate"], ["spec.yaml", "--against-runs", "x.csv"],
     ["--against-runs", "x.csv", "--verify"], ["--against-runs", "x.csv", "--output", "sarif"]],
)  # fmt: skip
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert "error: " in err


def test_excels_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    file = written(tmp_path / "runs.csv", [measured(1.0)])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    (line,) = read_table(file).lines
    assert (line.number, line.fault, line.cells.text("source")) == (2, "", "ours")


def test_too_large_a_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "runs.csv").open("wb") as file:
        file.truncate(300 * 2**20)
    with pytest.raises(RunTableError, match="300 MiB"):
        read_table(tmp_path / "runs.csv")


def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = (ROOT / "docs/guide/own-runs.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```csv\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "runs.csv").write_text(example, encoding="utf-8")
    found = data(capsys, tmp_path / "runs.csv")
    assert (found["rows"], found["priced"], found["unread"], found["ignored_columns"]) == (2, 2, [], [])
    assert [(row["metric"], row["stack"], row["open"]) for row in found["results"]] == [
        ("time", "megatron", []), ("memory", "megatron", []), ("time", "fsdp2-compiled", []),
    ]  # fmt: skip
    assert all(abs(row["error"]) < 0.3 for row in found["results"])
    columns = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w.*?) \|", page, re.MULTILINE))))
    assert set(example.splitlines()[0].split(",")) <= columns
