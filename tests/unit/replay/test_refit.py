"""The refit of constants: values that were put in come out, and a source that is left out does not count."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from partool.cost.training.predict import predict_time
from partool.replay.cases import case_of
from partool.replay.cells import Cells

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import refit as command  # noqa: E402
from replaying.fit import Prices, Search, constant_of, fitted, refit, timed_rows  # noqa: E402

BASE = {
    "stack": "fsdp2", "compile": "no", "model": "llama3-8b", "seq_len": "4096", "gpu": "h100-sxm", "n_gpus": "8",
    "gpus_per_node": "8", "dtype": "bf16", "tp": "4", "dp": "2", "pp": "1", "zero_or_fsdp": "FSDP2",
    "recompute": "full", "micro_batch": "2", "notes": "",
}  # fmt: skip


def row(source: str, batch: int, copies: float, **changes: str) -> dict[str, str]:
    """Return a row that took as long as it is predicted with so many copies."""
    cells = {**BASE, "source": source, "global_batch": str(batch), **changes}
    job, layout = case_of(Cells(cells)).options[0]
    changed = replace(job, stack=replace(job.stack, tensor_copies=copies))
    return {**cells, "step_time_s": f"{predict_time(changed, layout, 1).step_time_s:.9g}"}


def prices_of(path: Path, rows: Sequence[Mapping[str, str]]) -> Prices:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return Prices(timed_rows(path, most=50, seed=1))


COPIES = constant_of("fsdp2.tensor_copies=0:12")


def test_a_constant_that_was_put_in_comes_out_and_rows_without_it_are_priced_once(tmp_path: Path) -> None:
    rows = [row(source, batch, 6.0) for source in "ab" for batch in (8, 16)]
    others = [row("c", batch, 6.0, stack="deepspeed", zero_or_fsdp="ZeRO-3", tp="1", dp="8") for batch in (8, 16)]
    prices = prices_of(tmp_path / "runs.csv", rows + others)
    values = fitted(prices, [COPIES], Search())
    assert values[COPIES] == pytest.approx(6.0, abs=0.1)
    assert prices.loss(values, without=("c",)) == pytest.approx(0.0, abs=1e-4)
    assert sum(number >= len(rows) for number, _ in prices.known) == len(others)


def test_sources_count_alike_and_a_source_that_is_left_out_does_not_count(tmp_path: Path) -> None:
    """One source with many rows took 2 copies, two sources with one row each 8: together the two decide."""
    rows = [row("many", 8 * batch, 2.0) for batch in range(1, 9)] + [row(name, 8, 8.0) for name in ("few", "fewer")]
    prices = prices_of(tmp_path / "runs.csv", rows)
    outcome = refit(prices, [COPIES], Search(rounds=1))
    assert outcome.values[COPIES] == pytest.approx(8.0, abs=0.1)
    many = next(one for one in outcome.sources if one.source == "many")
    assert many.all_sources == many.left_out
    assert many.left_out[0] > 0.01
    alone = fitted(prices, [COPIES], Search(rounds=1), without=("few", "fewer"))
    assert alone[COPIES] == pytest.approx(2.0, abs=0.1)


def test_a_constant_of_left_out_sources_alone_keeps_its_value(tmp_path: Path) -> None:
    rows = [row("a", 8, 6.0), row("b", 8, 6.0, stack="deepspeed", zero_or_fsdp="ZeRO-3", tp="1", dp="8")]
    prices = prices_of(tmp_path / "runs.csv", rows)
    assert fitted(prices, [COPIES], Search(), without=("a",))[COPIES] == COPIES.shipped


def test_what_a_row_says_of_itself_stays(tmp_path: Path) -> None:
    """Asynchronous tensor parallelism, which a row states, hides half of the collectives whatever is fitted."""
    prices = prices_of(tmp_path / "runs.csv", [row("a", 8, 1.0), row("b", 8, 1.0, notes="async TP")])
    hidden = constant_of("fsdp2.overlap_tensor=0:1")
    plain, stated = prices.rows
    assert prices.log_error(plain, {hidden: 0.9}) < prices.log_error(plain, {hidden: 0.0}) - 0.01
    assert prices.log_error(stated, {hidden: 0.9}) == prices.log_error(stated, {hidden: 0.0})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fsdp9.derate=1:2", "no stack 'fsdp9'"), ("fsdp2.speed=1:2", "no number 'speed'"),
        ("fsdp2.derate", "LOW:HIGH"), ("fsdp2.derate=2:1", "empty"), ("fsdp2,megatron.derate=1:2", "several values"),
        ("fsdp2.attention=1:2", "no number 'attention'"),
    ],
)  # fmt: skip
def test_a_wrong_constant_is_told(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        constant_of(text)


def test_the_constants_of_the_command_are_there() -> None:
    for constant in map(constant_of, command.DEFAULTS):
        assert constant.low <= constant.shipped <= constant.high, constant.name


def test_the_command_prints_both_tables(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    prices_of(file, [row("a", 8, 6.0), row("b", 8, 6.0)])
    arguments = [sys.executable, str(BENCH / "refit.py"), str(file), "--constant", "fsdp2.tensor_copies=0:12"]
    done = subprocess.run([*arguments, "--output", "json"], capture_output=True, text=True, timeout=60, check=True)
    data = json.loads(done.stdout)
    (constant,) = data["constants"]
    assert (constant["name"], constant["sources"], constant["shipped"]) == ("fsdp2.tensor_copies", 2, COPIES.shipped)
    assert data["median_of_medians"]["left_out"] < data["median_of_medians"]["shipped"]
    assert [one["source"] for one in data["sources"]] == ["a", "b"]
