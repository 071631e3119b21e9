"""The page about measured kernels says what the recorded judgements say."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

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
