"""What is decided about a matrix before it is laid over ranks: a choice, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from partool.layout.tensor.structure import Structure, StructureModule
from partool.layout.tensor.types import Range, Style

Heads = Literal["query", "key"]
LINEAR = ("linear", "conv1d")


@dataclass(frozen=True, slots=True)
class CutChoice:
    """How a matrix is cut, for any number of ranks."""

    style: Style
    rule: str
    why: str = ""
    parts: tuple[int, ...] = ()
    """Widths of the matrices that are fused into this one; none: it is a single one."""
    unit: int = 1
    """Widths that stay together."""
    heads: Heads | None = None
    """Cut by whole heads: those of queries, or of keys and values; with ``parts``, each by its width."""
    summed: bool = False
    """Each rank has a part of the gradient."""
    summed_outputs: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Unclear:
    """No choice can be made."""

    why: str
    """Continues the sentence "NAME cannot be cut: …"."""
    line: str = '"NAME": replicated'
    """Entries of ``patterns`` that would decide; NAME stands for the module's."""


@dataclass(frozen=True)
class ModuleGroup:
    """Modules with the same parent: an attention, a feed-forward network."""

    structure: Structure
    name: str
    class_name: str
    members: tuple[StructureModule, ...]

    @cached_property
    def attention(self) -> bool:
        """True of an attention, by the names of the parent and of its class."""
        leaf = self.name.rpartition(".")[2].lower()
        return any(word in text for word in ("attn", "attention") for text in (leaf, self.class_name.lower()))

    @cached_property
    def block(self) -> bool:
        """True of a layer itself."""
        parent, _, leaf = self.name.rpartition(".")
        return bool(self.structure.blocks) and parent == self.structure.blocks and leaf.isdigit()

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Output and input widths of the matrices, by their modules' names, in order."""
        return {module.name: widths(module) for module in self.members if module.kind in LINEAR}


class Subject(NamedTuple):
    """What is decided about."""

    structure: Structure
    group: ModuleGroup | None
    """What the module is part of; None of the embedding, the head and the model itself."""
    module: StructureModule
    name: str
    """Of the parameter, in full; of a matrix with a bias, the matrix's."""


def widths(module: StructureModule) -> tuple[int, int]:
    """Return output and input width of a linear module."""
    first, second = module.parameters["weight"]
    return (second, first) if module.kind == "conv1d" else (first, second)


def leaf(name: str) -> str:
    """Return the last part of a module's name."""
    return name.rpartition(".")[2]


def groups(structure: Structure) -> dict[str, ModuleGroup]:
    """Return the groups of all modules by the names of their parents; embedding and head belong to none."""
    classes = {module.name: module.class_name for module in structure.modules}
    members: dict[str, list[StructureModule]] = {}
    for module in structure.modules:
        if module.name not in ("", structure.embedding, structure.head):
            members.setdefault(module.name.rpartition(".")[0], []).append(module)
    return {name: ModuleGroup(structure, name, classes.get(name, ""), tuple(found)) for name, found in members.items()}


def head_kind(structure: Structure, width: int) -> Heads | None:
    """Return whether a width is that of all query heads or of all key heads; None: neither."""
    if width == structure.heads * structure.head_dim:
        return "query"
    return "key" if width == structure.kv_heads * structure.head_dim else None
