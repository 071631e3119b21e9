"""Public functions and classes have a caller in the product: what only tests call belongs to tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from house import imported_names, modules

ROOT = Path(__file__).parents[3]
BY_NAME = {
    "command": "partool.cli.main imports a command's module by its name and takes this function",
    "case": "partool_kernels.describe lists kernels and takes their cases by the module's name",
    "parts": "a sequence method's price, which partool.cost.sequence.price finds by the module's name",
    "exchange": "as parts",
    "buffers": "as parts",
    "put": "a sequence method of the runtime, found by the record's name",
    "render": "a target's text, found by the record's name",
    "findings": "as render",
    "checks": "a target's checks of the environment, found by the record's name",
    "objects": "a kind of Kubernetes job, found by the kind's name",
    "train": "partool.strategies.jobs names it",
    "evaluate": "as train",
    **dict.fromkeys(
        ("WandbTracker", "MlflowTracker", "TrackioTracker", "TensorBoardTracker"), "their records name them"
    ),
}
"""Functions that the product finds by name, with the place that does."""
KERNELS = "kernel"
"""Modules of this name hold Triton kernels, which a library finds by name."""
ONLY_TESTS = {
    "partool.api.check": "the Python face, for users",
    "partool.engines.read.read": "the short form for one file of read_files, exported for other programs",
    "partool.layout.grid.exchanges": "tests of grids take the expected number of exchanges from it",
    "partool.layout.mesh.group_of": "the definition of a group, with which tests compare all other ways to find one",
    "partool.schedule.transform.after": "schedules that begin in the middle: pipeline tests cut with it",
    "partool_kernels.modelled.missing": "a test fails where a shipped table lacks entries",
    "partool_kernels.select.products.matmul": "measured by benchmarks; the planner takes products of torch",
    "partool_kernels.select.products.grouped": "as matmul",
    "partool_kernels.small.small": "small configurations with which the interpreter runs kernels in tests",
}
"""Functions without a caller in the product, with the reason why they stay. This list only shrinks."""


def definitions(tree: ast.Module) -> dict[str, tuple[int, int]]:
    """Return the first and last line of each function and class of a module's top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: (node.lineno, node.end_lineno or node.lineno) for node in tree.body if isinstance(node, kinds)}


def dotted(node: ast.expr) -> tuple[str, ...]:
    """Return the names of ``a.b.c``; the first one is empty where they begin with another expression."""
    if isinstance(node, ast.Attribute):
        return (*dotted(node.value), node.attr)
    return (node.id if isinstance(node, ast.Name) else "",)


def mentions(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield the full names that a module's code mentions; a definition's own lines do not mention it."""
    bound, own = imported_names(tree), definitions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in own:
            first, last = own[node.id]
            if not first <= node.lineno <= last:
                yield f"{module}.{node.id}"
        elif isinstance(node, ast.Name) and node.id in bound:
            yield bound[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            head, *rest = dotted(node)
            if head in bound:
                yield ".".join((bound[head], *rest))


def unused(files: dict[str, Path]) -> set[str]:
    """Return the full names of public functions and classes that no code mentions, re-exports of packages left out."""
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in files.items()}
    exported = {
        f"{module}.{name}": full
        for module, path in files.items()
        if path.name == "__init__.py"
        for name, full in imported_names(trees[module]).items()
    }
    mentioned = {name for module, tree in trees.items() for name in mentions(module, tree)}
    while further := {exported[name] for name in mentioned & exported.keys()} - mentioned:
        mentioned |= further
    public = {
        f"{module}.{name}"
        for module, tree in trees.items()
        for name in definitions(tree)
        if not name.startswith("_") and not module.endswith(f".{KERNELS}")
    }
    return {name for name in public - mentioned if name.rpartition(".")[2] not in BY_NAME}


def test_every_public_function_has_a_caller_in_the_product() -> None:
    assert unused(modules(ROOT)) == ONLY_TESTS.keys()


def test_the_checker_sees_what_nothing_calls(tmp_path: Path) -> None:
    texts = {
        "a.py": "def used(): pass\ndef exported(): pass\ndef alone(): return alone()\ndef inner(): pass\nx = inner()\n",
        "room/__init__.py": "from partool.a import exported, alone\n__all__ = ['exported', 'alone']\n",
        "b.py": "from partool import a\nfrom partool.room import exported\na.used(), exported()\n",
    }
    for name, text in texts.items():
        (tmp_path / "partool" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "partool" / name).write_text(text)
    assert unused(modules(tmp_path)) == {"partool.a.alone"}
