"""Runs the unit tests of what has changed: ``python tests/changed.py [COMMIT] [ARGUMENTS OF PYTEST]``.

``make test-changed`` calls it. Changed is what differs from COMMIT (by default the last one), with files that git does
not know yet. A test file is chosen if it has changed or imports a changed module itself or through the tests' own
modules; a module that no test imports is tested where the modules that import it are. The files that depend on the
change most come first, and none begins after :data:`SECONDS`: pytest's last line says how many it left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "unit"))

import house

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"

SECONDS = float(os.environ.get("PARTOOL_CHANGED_SECONDS", "60"))
"""Tests that have not begun after this time are left out; 0 runs all."""
_STARTED = "PARTOOL_CHANGED_STARTED"


def changed_files(commit: str) -> set[Path]:
    """Return the files that differ from a commit, and those that git neither follows nor ignores.

    Ends the process with git's message if there is no such commit.
    """
    commands = (["diff", "--name-only", "--relative", commit], ["ls-files", "--others", "--exclude-standard"])
    answers = [subprocess.run(["git", *each], cwd=ROOT, text=True, capture_output=True) for each in commands]
    if wrong := next((each for each in answers if each.returncode), None):
        sys.exit(f"tests/changed.py: {wrong.stderr.splitlines()[0]}")
    return {ROOT / line for each in answers for line in each.stdout.splitlines()}


def modules_of_tests() -> dict[str, Path]:
    """Return the Python files of the tests by the name by which other tests import them."""
    return {path.stem: path for path in sorted(TESTS.rglob("*.py")) if "bench" not in path.parts}


def depths(changed: set[str], edges: dict[str, set[str]], wanted: set[str]) -> dict[str, int]:
    """Return which of the wanted modules depend on changed ones, with the number of imports between both.

    A way ends at a wanted module, and at a module whose wanted importers were found.
    """
    importers: dict[str, set[str]] = {}
    for name, others in edges.items():
        for other in others:
            importers.setdefault(other, set()).add(name)
    depth = dict.fromkeys(changed & wanted, 0)
    for start in changed:
        level, seen = {start}, {start}
        for distance in range(1, len(edges)):
            level = {name for each in level for name in importers.get(each, ())} - seen
            seen |= level
            reached = level & wanted
            for name in reached:
                depth[name] = min(distance, depth.get(name, distance))
            if reached or not level:
                break
    return depth


def mentioning(file: Path, texts: dict[str, str]) -> set[str]:
    """Return the modules whose text names a file that is no module, or else the nearest folder that any names."""
    if file.suffix == ".md":
        return {"test_docs_pages", "test_samples"}
    for part in reversed(file.relative_to(ROOT).parts):
        naming = {name for name, text in texts.items() if f'"{part}"' in text or f"/{part}" in text}
        if naming:
            return naming
    return set()


@cache
def read() -> tuple[dict[str, Path], dict[str, Path], dict[str, set[str]], dict[str, set[str]]]:
    """Return the modules of the tests and of the product, what each imports, and what tests import through their own.

    Kept, as reading all files takes seconds.
    """
    helpers, product = modules_of_tests(), house.modules(ROOT)
    edges = house.graph({**product, **helpers})
    tests = {name for name in helpers if name.startswith("test_")}
    return helpers, product, edges, _through_helpers(edges, helpers, tests)


def chosen(files: set[Path]) -> tuple[list[Path], list[Path]]:
    """Return the unit tests to run, the closest to the change first, and other test files that depend on it."""
    helpers, product, edges, imports = read()
    tests = imports.keys()
    names = {path: name for name, path in {**product, **helpers}.items()}
    data = [file for file in files if file not in names and file.suffix != ".py"]
    texts = {name: path.read_text(encoding="utf-8") for name, path in helpers.items() if name != Path(__file__).stem}
    changed = {names[file] for file in files if file in names}.union(*(mentioning(file, texts) for file in data))
    depth = depths(changed, edges | imports, tests)
    folders = {folder for file in files for folder in file.relative_to(ROOT).parts[:-1]}

    def order(name: str) -> tuple[int, int, int]:
        path = helpers[name]
        shared = len(folders & set(path.relative_to(TESTS / "unit").parts[:-1])) if "unit" in path.parts else 0
        return depth[name], -shared, len(edges[name])

    ordered = [helpers[name] for name in sorted(depth, key=order)]
    units = [path for path in ordered if path.is_relative_to(TESTS / "unit")]
    return units, [path for path in ordered if path not in units]


def _through_helpers(edges: dict[str, set[str]], helpers: dict[str, Path], tests: set[str]) -> dict[str, set[str]]:
    """Return what the tests import, with what the tests' own modules import."""

    def resolved(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        every = set()
        for other in edges[name]:
            every.add(other)
            if other in helpers and other not in seen:
                every |= resolved(other, seen | {name})
        return every

    return {name: resolved(name) for name in tests}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a test that would begin too late."""
    if SECONDS and time.time() - float(os.environ[_STARTED]) > SECONDS:
        pytest.skip(f"not begun within {SECONDS:g} s")


def main(arguments: list[str]) -> int:
    """Choose and run; returns pytest's exit code."""
    commit = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "HEAD"
    units, others = chosen(changed_files(commit))
    if others:
        print("Test files that start ranks or clusters and depend on the change, which are not run:")
        print("  " + " ".join(str(path.relative_to(ROOT)) for path in others))
    if not units:
        print(f"No unit test depends on what differs from {commit}.")
        return 0
    print(f"{len(units)} files of unit tests depend on what differs from {commit}.", flush=True)
    environment = os.environ | {_STARTED: str(time.time())}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "changed", "-p", "no:cacheprovider", "-n", "2"]
    return subprocess.run([*command, *arguments, *map(str, units)], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
