"""The figures of the code count what they say."""

from __future__ import annotations

import ast
from pathlib import Path

from house import Faults, loose_types
from words import vague_names


def test_loose_types_are_counted_where_others_see_them() -> None:
    text = """
def public(a: dict[str, Any], b: int = 0) -> Any: x: Any = 1
def _private(a: dict[str, Any]): pass
class Record:
    values: dict[str, Any]
    _inner: Any
"""
    assert loose_types(ast.parse(text)) == {
        "Any, all": 6, "dict[str, Any], all": 3, "Any, public": 3, "dict[str, Any], public": 2
    }  # fmt: skip


def test_vague_names_are_counted_where_they_are_assigned(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("found = own = 1\nfor left in found: pass\nwith x as held: print(own)\nf(known=1)\n")
    assert vague_names({"partool.launch.a": tmp_path / "a.py"}) == {
        "partool.launch": {"found": 1, "own": 1, "left": 1, "held": 1}
    }


def test_faults_are_counted_by_package(tmp_path: Path) -> None:
    (tmp_path / "low.py").write_text("from partool.cli.main import run\nfound = run\n")
    (tmp_path / "high.py").write_text("")
    files = {"partool.cost.low": tmp_path / "low.py", "partool.cli.main": tmp_path / "high.py"}
    faults = Faults.of(files)
    assert (faults.upward["partool"], faults.vague, faults.words) == (1, {"partool.cost.low": 1}, {"found": 1})
