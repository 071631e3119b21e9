"""Figures of the code: ``python tests/unit/house.py [FOLDER]`` prints files, lines, small files, loose types, patches,
imports that lead up, vague names, import cycles and how many files name each strategy.

FOLDER is another checkout to compare with, such as a git worktree of an older commit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from _layers import KERNEL_LAYERS, LAYERS, RUNTIME_LAYERS, upward
from words import vague_names

from partool.strategies.optimizers import OPTIMIZERS
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS
from partool.strategies.targets import TARGETS

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "partool": "partool",
    "partool_runtime": "runtime/partool_runtime",
    "partool_kernels": "kernels/partool_kernels",
}
_TYPING = "TYPE_CHECKING"
SMALL = 60
"""Lines below which a file is small."""
STRATEGIES: dict[str, Iterable[str]] = {
    "schedules": SCHEDULES, "sequence methods": METHODS, "optimizers": OPTIMIZERS, "targets": TARGETS
}  # fmt: skip


ORDERS = {"partool": LAYERS, "partool_runtime": RUNTIME_LAYERS, "partool_kernels": KERNEL_LAYERS}
"""Order of the packages' rooms, by package."""


def modules(root: Path) -> dict[str, Path]:
    """Return the files of all packages by the name of their module."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            name = ".".join((package, *path.relative_to(root / folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


@dataclass(frozen=True, slots=True)
class Import:
    """What one import of a file names."""

    module: str
    """The module of ``import module``, or of ``from module import name``."""
    name: str
    """The imported name, with its module; the module itself where it is imported."""
    line: int
    at_top: bool
    """Whether it is no part of a function or block."""
    typing: bool
    """Whether it lies in a type-checking block."""


@cache
def import_lines(path: Path) -> tuple[Import, ...]:
    """Return the imports of a file, in functions and type-checking blocks too; relative ones are left out.

    Kept, as several tests read all files, and parsing them takes seconds.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    every = list(ast.walk(tree))
    blocks = (node for node in every if isinstance(node, ast.If))
    checked = [block for block in blocks if getattr(block.test, "id", getattr(block.test, "attr", "")) == _TYPING]
    typing = {child for block in checked for part in block.body for child in ast.walk(part)}
    top = set(tree.body)
    return tuple(
        Import(module, name, node.lineno, node in top, node in typing)
        for node in every
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module, name in _names(node)
    )


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield the module and the full name of each name that an import names."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, alias.name) for alias in node.names)
    elif node.module and node.level == 0:
        yield from ((node.module, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def imported(path: Path) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the names that a file imports, in functions and type-checking blocks too, and those of its top level.

    Last come the names of all imports outside of type-checking blocks.
    """
    every = import_lines(path)
    groups = (every, [one for one in every if one.at_top], [one for one in every if not one.typing])
    names = [frozenset(one.name for one in group) for group in groups]
    return names[0], names[1], names[2]


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the full name of each name that a module's imports bind."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
    return bound


def graph(files: dict[str, Path], *, typing: bool = True) -> dict[str, set[str]]:
    """Return the modules that each module imports; a name in a package counts as its submodule, else as the package.

    Without ``typing``, imports of type-checking blocks are left out.
    """
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        wanted = ((full, full.rpartition(".")[0]) for full in imported(path)[0 if typing else 2])
        edges[name] = {next((one for one in pair if one in files), "") for pair in wanted} - {"", name}
    return edges


def executed(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return the modules that run as each module is imported: its top-level imports and the packages that hold them.

    A module's own parent packages run before the module, and are left out.
    """
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        around = {full.rsplit(".", count)[0] for full in imported(path)[1] for count in range(full.count(".") + 1)}
        edges[name] = {one for one in around if one in files and not f"{name}.".startswith(f"{one}.")}
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not (Tarjan, SIAM J. Comput. 1 (1972))."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def logical_lines(path: Path) -> int:
    """Count the logical lines of a file, docstrings and comments left out."""
    text = path.read_text(encoding="utf-8")
    lines = sum(token.type == tokenize.NEWLINE for token in tokenize.generate_tokens(io.StringIO(text).readline))
    alone = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return lines - sum(1 for _ in alone)


CLASS = re.compile(r"^\s*class ([A-Za-z]\w*)", re.MULTILINE)
"""A public class; other texts may look like one."""


def shared_names(files: dict[str, Path]) -> dict[str, int]:
    """Return the public class names that several files define, with the number of files."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    said = Counter(word for text in texts.values() for word in set(CLASS.findall(text)))
    places: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        if not any(said[word] > 1 for word in CLASS.findall(text)):
            continue  # parsing all files takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(name)
    return {name: len(of) for name, of in sorted(places.items()) if len(of) > 1}


def naming(files: dict[str, Path], names: Iterable[str]) -> dict[str, int]:
    """Return in how many files each name is a string literal, without ``partool.cli`` and ``partool.diagnostics``."""
    texts = []
    for module, path in files.items():
        if not module.startswith(("partool.cli", "partool.diagnostics")):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            texts.append(
                {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            )
    return {name: sum(name in each for each in texts) for name in names}


def loose_types(tree: ast.AST) -> Counter[str]:
    """Count ``Any`` and ``dict[str, Any]`` in a file: all, and in public signatures and fields of public classes."""
    found = Counter(_loose(tree, "all"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(node.name):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for part in (*(argument.annotation for argument in arguments), node.returns):
                found.update(_loose(part, "public") if part else {})
        elif isinstance(node, ast.ClassDef) and _is_public(node.name):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and _is_public(ast.unparse(field.target)):
                    found.update(_loose(field.annotation, "public"))
    return found


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _loose(tree: ast.AST, where: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "Any":
            found[f"Any, {where}"] += 1
        elif isinstance(node, ast.Subscript) and _is_loose_dict(node):
            found[f"dict[str, Any], {where}"] += 1
    return found


def _is_loose_dict(node: ast.Subscript) -> bool:
    of = [part.id for part in (node.value, *getattr(node.slice, "elts", ())) if isinstance(part, ast.Name)]
    return of == ["dict", "str", "Any"]


def is_patch(node: ast.AST) -> bool:
    """Return whether a node calls ``setattr``, or assigns to ``forward`` or ``__class__`` of an object."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "setattr"
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    flat = [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return any(
        (isinstance(each, ast.Attribute) and each.attr in ("forward", "__class__") and not _is_none(node))
        or (isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Constant) and each.slice.value == "forward")
        for each in flat
    )


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None


@dataclass(frozen=True)
class Faults:
    """Counts that should fall, of one checkout."""

    loose: dict[str, int]
    patches: dict[str, int]
    """By package."""
    upward: dict[str, int]
    vague: dict[str, int]
    """Vague names by package, counted as ``test_words`` does."""
    words: dict[str, int]
    """How often each vague name is assigned."""

    @classmethod
    def of(cls, files: dict[str, Path]) -> Faults:
        """Count in the files of a checkout."""
        loose, patched, vague = Counter[str](), Counter[str](), vague_names(files)
        for name, path in files.items():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            package = ".".join(name.split(".")[:2])
            loose.update(loose_types(tree))
            patched[package] += sum(map(is_patch, ast.walk(tree)))
        edges = graph(files, typing=False)
        up = {package: len(upward(edges, package, layers)) for package, layers in ORDERS.items()}
        words = sum(vague.values(), Counter[str]())
        totals = {package: names.total() for package, names in sorted(vague.items())}
        return cls(dict(loose), dict(+patched), up, totals, dict(words))

    def lines(self) -> Iterator[str]:
        """Yield a line per kind of fault."""
        yield f"loose types: {self.loose}"
        yield f"{sum(self.patches.values())} patches of methods: {self.patches}"
        yield f"{sum(self.upward.values())} imports that lead up: {self.upward}"
        yield f"{sum(self.vague.values())} vague names assigned: {self.vague}"
        yield f"vague names by word: {self.words}"


@dataclass(frozen=True)
class Figures:
    """Figures of one checkout."""

    files: int
    lines: int
    logical: int
    small: int
    cycles: list[list[str]]
    shared: dict[str, int]
    naming: dict[str, dict[str, int]]
    """Number of files that contain a name, by kind of strategy and name."""
    faults: Faults

    @classmethod
    def of(cls, root: Path) -> Figures:
        """Read a checkout."""
        files = modules(root)
        lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
        small = [name for name, path in files.items() if lengths[name] < SMALL and path.name != "__init__.py"]
        logical = sum(map(logical_lines, files.values()))
        found = cycles(graph(files))
        named = {kind: naming(files, names) for kind, names in STRATEGIES.items()}
        shared, faults = shared_names(files), Faults.of(files)
        return cls(len(files), sum(lengths.values()), logical, len(small), found, shared, named, faults)


def main() -> None:
    """Print the figures of this checkout, and of another one before them."""
    for root in (*map(Path, sys.argv[1:]), ROOT):
        if not modules(root):
            sys.exit(f"{root} is no checkout of partool")
        own = Figures.of(root)
        print(f"{root}: {own.files} files, {own.small} of them below {SMALL} lines")
        print(f"  {own.lines} lines, {own.logical} of them logical, without docstrings")
        print(f"  {len(own.cycles)} cycles of imports: {own.cycles}")
        print(f"  {len(own.shared)} names that several classes have: {own.shared}")
        for line in own.faults.lines():
            print(f"  {line}")
        for kind, counts in own.naming.items():
            print(f"  files that know {kind} by name: {counts}")


if __name__ == "__main__":
    main()
