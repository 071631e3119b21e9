"""Names and files that docstrings and pages refer to are there: moves and renames leave no stale ones."""

from __future__ import annotations

import re
from pathlib import Path

from house import ROOT, modules

FILES = modules(ROOT)
SOURCES = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
ROOTS = [
    ROOT,
    ROOT / "partool",
    ROOT / "partool/cost",
    ROOT / "runtime",
    ROOT / "runtime/partool_runtime",
    ROOT / "kernels",
    ROOT / "kernels/partool_kernels",
]
NO_MODULES = {"partool.specs", "partool.templates", "partool.dev"}
"""Folders of data, and a domain."""


def stands(name: str) -> bool:
    """Return True for a module, or for what one holds: a name, or a name in one of its classes."""
    parts = name.split(".")
    for end in (len(parts), len(parts) - 1, len(parts) - 2):
        if (source := SOURCES.get(".".join(parts[:end]))) is not None:
            return all(re.search(rf"\b{part}\b", source) for part in parts[end:])
    return False


def test_names_in_docstrings_stand() -> None:
    roles = re.compile(r":(?:class|func|mod|data|meth|attr):`~?(partool\w*\.[\w.]+)`")
    found = [(name, ref) for name, text in SOURCES.items() for ref in roles.findall(text) if not stands(ref)]
    assert found == []


def test_names_and_files_in_pages_stand() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in files}
    moved = "docs/design/moved.md"  # whose first column has names that are no more
    pages[moved] = re.sub(r"^\|[^|]*", "", pages[moved], flags=re.MULTILINE)
    names = [(page, ref) for page, text in pages.items() for ref in re.findall(r"`(partool\w*\.[a-z][\w.]*)`", text)]
    assert [each for each in names if each[1] not in NO_MODULES and not stands(each[1])] == []
    paths = [(page, ref) for page, text in pages.items() for ref in re.findall(r"`(\w[\w/]*/\w+\.py)`", text)]
    assert len(paths) > 30
    assert [each for each in paths if not any((root / each[1]).is_file() for root in ROOTS)] == []
    table = re.findall(r"^\| `((?:\w+/)?\w+\.py)`", pages["docs/design/cost-model.md"], re.MULTILINE)
    assert [name for name in table if not (Path(ROOT) / "partool/cost" / name).is_file()] == []
