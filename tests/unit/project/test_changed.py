"""Which tests are chosen for a change."""

from __future__ import annotations

from pathlib import Path

import pytest
from changed import ROOT, changed_files, chosen, depths

UNIT = ROOT / "tests/unit"


def names(*files: str) -> tuple[list[str], list[str]]:
    units, others = chosen({ROOT / file for file in files})
    return [str(path.relative_to(UNIT)) for path in units], [path.name for path in others]


def test_a_module_chooses_the_tests_that_import_it() -> None:
    units, others = names("partool/cost/training/peak.py")
    assert units[0].startswith("cost/")
    assert {"cost/test_memory.py", "planner/test_planner_bounds.py"} <= set(units)
    assert "schedule/test_schedule.py" not in units
    units, others = names("runtime/partool_runtime/parallel/zero.py")
    assert "test_zero.py" in others


def test_a_helper_and_a_test_choose_themselves_and_what_imports_them() -> None:
    assert names("tests/unit/schedule/test_schedule.py")[0] == ["schedule/test_schedule.py"]
    units, _ = names("tests/unit/_bounds.py")
    importers = {"planner/test_planner_bounds.py", "runtime/calibrate/test_calibrate_shapes.py"}
    importers |= {"planner/test_reference_prices.py", "planner/test_planner_distill.py"}
    assert set(units) == importers | {"silicon/test_collectives.py", "silicon/test_calibrated_rows.py"}


def test_pages_and_data_choose_the_tests_that_name_them() -> None:
    assert "project/test_docs_pages.py" in names("docs/guide/launch.md")[0]
    assert names("tests/unit/golden/{}.json".format("practice"))[0] == [
        "planner/test_practice.py",
        "planner/test_planner_answers.py",
    ]


def test_modules_without_a_test_are_tested_where_they_are_used() -> None:
    edges = {"test_a": {"a"}, "test_b": {"b", "x"}, "a": {"deep"}, "b": {"a"}, "x": set(), "deep": set()}
    tests = {"test_a", "test_b"}
    assert depths({"deep"}, edges, tests) == {"test_a": 2}
    assert depths({"a"}, edges, tests) == {"test_a": 1}
    assert depths({"x"}, edges, tests) == {"test_b": 1}
    assert depths({"test_a"}, edges, tests) == {"test_a": 0}
    assert depths({"elsewhere"}, edges, tests) == {}


def test_all_chosen_files_exist() -> None:
    units, others = chosen({ROOT / "partool/spec/model.py"})
    assert all(isinstance(path, Path) and path.is_file() for path in [*units, *others])
    assert len(units) > 10


def test_a_commit_that_git_does_not_know_ends_with_its_message() -> None:
    with pytest.raises(SystemExit, match=r"tests/changed\.py: fatal: .*no-such-commit"):
        changed_files("no-such-commit")
