"""The figures of docs/results/offload.md are those of the cost model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partool.planner.make import make_plan
from partool.spec.loader import load_text

PAGE = (Path(__file__).parents[2] / "docs/results/offload.md").read_text(encoding="utf-8")
SPEC = re.search(r"```yaml\n(spec: 1\nname: tiers\n.*?)```", PAGE, re.DOTALL)
ROW = re.compile(r"^\| ([a-z0-9-]+), [\w -]+ \| ([\d,]+) \|((?: [\d.]+ s \|){4})$", re.MULTILINE)
ROWS = [(name, int(tokens.replace(",", "")), cells.split("|")) for name, tokens, cells in ROW.findall(PAGE)]
CASES = [("h100-sxm", 4096, 1, "true"), ("h100-sxm", 4096, 2, "false"), ("a100-80", 16384, 1, "true")]
"""Device, tokens, column behind the first, and the way to step: some cells, for each takes a plan."""


def test_rows_are_found() -> None:
    assert len(ROWS) == 7


@pytest.mark.parametrize(("device", "tokens", "column", "speculate"), CASES)
def test_figures(device: str, tokens: int, column: int, speculate: str) -> None:
    (cells,) = [cells for name, count, cells in ROWS if (name, count) == (device, tokens)]
    assert SPEC is not None
    text = SPEC[1].replace("h100-sxm", device).replace("global_batch: 1", f"global_batch: {tokens // 4096}")
    loaded = load_text(text.replace("optimizer: cpu,", f"optimizer: cpu, speculate: {speculate},"))
    assert loaded.spec is not None, loaded.diagnostics
    plan = make_plan(loaded.spec, base_dir=Path(), default_name="tiers").plan
    assert plan is not None
    assert plan.layout.offload.optimizer == "cpu"
    assert float(cells[column].split()[0]) == pytest.approx(plan.prediction.time.step_time_s, rel=0.015)
