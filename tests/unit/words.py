"""Names that say too little: a variable called ``found`` may hold anything."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

VAGUE = frozenset({
    "found", "own", "whole", "known", "told", "held", "left", "there", "done", "again", "coming", "late", "lone"
})  # fmt: skip
DIVIDED = ("partool.cost", "partool.planner", "partool_runtime.parallel")
"""Packages whose parts are counted one by one."""
PLAIN = {
    "left": {
        "partool.report": "the left side of a line or table",
        "partool.engines": "the left side of a comparison in a shell script",
        "partool.plan": "what a step leaves in memory: a field of the JSON that a dry run prints",
    },
    "done": {
        "partool.plan": "the state of a run that has ended well, as in status.json",
        "partool_runtime.offload": "whether a copy is done, as concurrent.futures.Future.done()",
        "partool_runtime.dry": "whether a copy is done, as concurrent.futures.Future.done()",
    },
    "again": {
        "partool.launch": "the option --again of partool tune",
        "partool.cli": "the options --again of partool launch and partool tune",
    },
}
"""Names in their plain sense, with the packages where they are not counted, each with the reason."""


COMPILED = "kernel"
"""Modules of code that Triton compiles. Users' measurements are filed under a hash of its text, so names in it stay."""


def package_of(module: str) -> str:
    """Return the package that a module's names are counted for."""
    parts = module.split(".")
    depth = 3 if ".".join(parts[:2]) in DIVIDED else 2
    return ".".join(parts[:depth])


def assigned(path: Path) -> Iterator[str]:
    """Yield each name that a file gives to a variable, a parameter, a field, a function or a class."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def vague_names(files: dict[str, Path]) -> dict[str, Counter[str]]:
    """Return how often each package assigns each vague name; packages without any are left out."""
    counts: dict[str, Counter[str]] = {}
    for module, path in files.items():
        if module.startswith("partool_kernels.") and path.stem == COMPILED:
            continue
        package = package_of(module)
        names = Counter(name.lstrip("_") for name in assigned(path) if name.lstrip("_") in VAGUE)
        for name in list(names):
            if package in PLAIN.get(name, {}):
                del names[name]
        if names:
            counts[package] = counts.get(package, Counter()) + names
    return counts
