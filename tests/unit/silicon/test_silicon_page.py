"""The page about measured kernels says what the recorded judgements say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests" / "bench"))
import silicon_page as silicon  # noqa: E402


def test_the_page_and_its_picture_are_those_of_the_records() -> None:
    assert (ROOT / "docs/results/silicon.md").read_text("utf-8") == silicon.page()
    assert (ROOT / "docs/results/silicon.svg").read_text("utf-8") == silicon.picture()
    dots = ElementTree.fromstring(silicon.picture()).iter("{http://www.w3.org/2000/svg}circle")
    rows = {family: silicon.rows_of(family) for family in silicon.FAMILIES}
    assert len(list(dots)) == 2 + 2 * sum(map(len, rows.values()))
    assert {family: len(each) > 8 for family, each in rows.items()} == dict.fromkeys(rows, True)


def test_tables_of_ten_rows_or_more_are_better_than_the_equations() -> None:
    worse = [
        row.name
        for family in silicon.FAMILIES
        for row in silicon.rows_of(family)
        if row.rows >= 10 and row.left_out[0] > row.equations[0]
    ]
    assert worse == []


def test_a_missed_bar_stands_on_the_page_beside_a_larger_difference_between_frameworks() -> None:
    judge = pytest.importorskip("silicon.judge_products")
    judged = json.loads((ROOT / "tests/bench/results/silicon_products.json").read_text("utf-8"))
    missed = set()
    for name, one in judged.items():
        table = name.split("/", 1)[1]
        for side, (median, p90) in judge.BARS.get(table, {}).items():
            errors = one["left out"][side]
            if errors["median"] > median or errors["p90"] > p90:
                missed.add((*name.split("/", 1), side))
                assert max(apart["median"] for apart in one["between frameworks"].values()) > errors["median"]
    assert missed == {("h200", "fp8_block/deepgemm", side) for side in ("m", "n")}
    assert "One table exceeds what the tests allow" in silicon.page()


@pytest.mark.parametrize("family", silicon.FAMILIES)
def test_a_picture_has_a_panel_for_each_table_of_the_page(family: str) -> None:
    scatter = pytest.importorskip("silicon_scatter", reason="pyarrow reads the measurements")
    path = ROOT / f"docs/results/silicon-{family}.svg"
    root = ElementTree.fromstring(path.read_text("utf-8"))
    name = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{name}g")
    assert len(panels) == len(silicon.rows_of(family))
    devices = [panel.find(f"{name}text").text for panel in panels]  # type: ignore[union-attr]
    assert sorted(devices) == sorted(row.name.split("/")[0] for row in silicon.rows_of(family))
    for panel in panels:
        dots = {path.get("class"): path.get("d", "").count("h0") for path in panel.findall(f"{name}path")}
        assert dots["new"] >= 2
    sizes = [int(size) for size in re.findall(r"(\d+)px", root.findtext(f"{name}style") or "")]
    assert min(size for size in sizes if size < 600) >= 11
    assert sum(each.stat().st_size for each in path.parent.glob("silicon-*.svg")) < 300_000
    assert scatter.FAMILIES.keys() == silicon.FAMILIES.keys()


def test_dots_show_ratios_and_keep_inside_of_their_panel() -> None:
    scatter = pytest.importorskip("silicon_scatter", reason="pyarrow reads the measurements")
    seconds, ratios = np.array([1e-5, 1e-3, 1e-1]), np.array([1.0, 9.0, 0.01])
    drawn = scatter.picture_of([scatter.Panel("h100-sxm", "bf16 linear", seconds, ratios, seconds, ratios)], "products")
    dots = [tuple(map(int, at)) for at in re.findall(r"M(\d+) (\d+)h0", drawn.split("<g ")[1])]
    top, bottom = scatter._TOP, scatter._TOP + scatter._PLOT_HIGH
    assert sorted({y for _, y in dots}) == [top, (top + bottom) // 2, bottom]
    assert {x for x, _ in dots} == {scatter._LEFT + scatter._PLOT_WIDE * part // 2 for part in (0, 1, 2)}
    assert "0.11 · 1.00 · 8.20" in drawn
