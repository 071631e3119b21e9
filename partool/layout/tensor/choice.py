"""Decision on how to cut a matrix over any number of ranks, or the reason why no decision can be made."""

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
    """Way to cut a matrix, for any number of ranks."""

    style: Style
    rule: str
    why: str = ""
    parts: tuple[int, ...] = ()
    """Widths of the matrices that are fused into this matrix; empty for a matrix that is not fused."""
    unit: int = 1
    """Number of adjacent elements of the cut dimension that are never divided between ranks."""
    heads: Heads | None = None
    """Kind of heads (query or key/value) that the cut keeps whole; with ``parts``, each part's width gives the kind."""
    summed: bool = False
    """True if each rank computes only a part of the gradient, to be summed over ranks."""
    summed_outputs: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Unclear:
    """Result if a rule cannot decide how a matrix is cut."""

    why: str
    """Reason; continues the sentence "NAME cannot be cut: …"."""
    line: str = '"NAME": replicated'
    """Entries of ``patterns`` with which a user can make the decision; NAME stands for the module's name."""


@dataclass(frozen=True)
class ModuleGroup:
    """Modules with the same parent, such as an attention or a feed-forward network."""

    structure: Structure
    name: str
    class_name: str
    members: tuple[StructureModule, ...]

    @cached_property
    def attention(self) -> bool:
        """Return True if the group is an attention, judged by the names of the parent module and of its class."""
        leaf = self.name.rpartition(".")[2].lower()
        return any(word in text for word in ("attn", "attention") for text in (leaf, self.class_name.lower()))

    @cached_property
    def block(self) -> bool:
        """Return True if the parent module is a layer itself."""
        parent, _, leaf = self.name.rpartition(".")
        return bool(self.structure.blocks) and parent == self.structure.blocks and leaf.isdigit()

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the output and input width of each matrix by the name of its module, in the order of the modules."""
        return {module.name: widths(module) for module in self.members if module.kind in LINEAR}


class Subject(NamedTuple):
    """Parameter that a decision is about."""

    structure: Structure
    group: ModuleGroup | None
    """Group that the module belongs to; None for the embedding, the head and the model itself."""
    module: StructureModule
    name: str
    """Full name of the parameter; for a matrix with a bias, the name of the matrix."""


def widths(module: StructureModule) -> tuple[int, int]:
    """Return the output width and the input width of a linear module."""
    first, second = module.parameters["weight"]
    return (second, first) if module.kind == "conv1d" else (first, second)


def leaf(name: str) -> str:
    """Return the last part of a module's name."""
    return name.rpartition(".")[2]


def groups(structure: Structure) -> dict[str, ModuleGroup]:
    """Return the module groups by the name of the parent module; embedding and head belong to no group."""
    classes = {module.name: module.class_name for module in structure.modules}
    members: dict[str, list[StructureModule]] = {}
    for module in structure.modules:
        if module.name not in ("", structure.embedding, structure.head):
            members.setdefault(module.name.rpartition(".")[0], []).append(module)
    return {
        name: ModuleGroup(structure, name, classes.get(name, ""), tuple(modules)) for name, modules in members.items()
    }


def head_kind(structure: Structure, width: int) -> Heads | None:
    """Return the kind of heads (query or key) whose total width is ``width``; None if neither total is ``width``."""
    if width == structure.heads * structure.head_dim:
        return "query"
    return "key" if width == structure.kv_heads * structure.head_dim else None
