"""Adapters of models that another library builds: which modules get one, and how tensor ranks share its matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partool.layout.adapters import A, added, is_target
from partool.layout.tensor.cutting import by_name, collapse, collapsed_name
from partool.layout.tensor.structure import Structure, StructureModule
from partool.layout.tensor.types import Partition
from partool.spec.adapter import LowRank

_LINEAR = "Linear"
"""Class of the modules that get adapters; a subclass may compute something else."""


def projections(structure: Structure) -> dict[str, tuple[int, int]]:
    """Return name and shape ``[out, in]`` of the linear modules of the layers."""
    return {
        module.name: (shape[0], shape[1])
        for module in _in_layers(structure)
        if module.kind == "linear" and module.class_name == _LINEAR
        for shape in [module.parameters["weight"]]
    }


def without_adapters(structure: Structure) -> list[str]:
    """Return the names of the layers' matrices that cannot have adapters: of experts, and of other classes."""
    names = []
    for module in _in_layers(structure):
        if module.kind == "experts":
            names += [f"{module.name}.{name}" for name, shape in module.parameters.items() if len(shape) == 3]
        elif module.kind == "conv1d" or (module.kind == "linear" and module.class_name != _LINEAR):
            names.append(module.name)
    return names


def _in_layers(structure: Structure) -> Iterator[StructureModule]:
    return (module for module in structure.modules if module.name.startswith(f"{structure.blocks}."))


def adapted(structure: Structure, adapter: LowRank) -> dict[str, tuple[int, int]]:
    """Return name and shape of the modules that get an adapter."""
    return {name: shape for name, shape in projections(structure).items() if is_target(adapter, name)}


def short_names(structure: Structure) -> dict[str, tuple[str, ...]]:
    """Return the short names in ``adapter.train`` and the patterns of names that they stand for."""
    norms = {
        collapsed_name(f"{module.name}.{name}"): None
        for module in structure.modules
        if module.kind == "norm"
        for name in module.parameters
    }
    head = f"{structure.head}.weight"
    return {
        "embed": (f"{structure.embedding}.weight",),
        "head": (structure.tied.get(head, head),),
        "norms": tuple(norms),
    }


def shapes(structure: Structure, adapter: LowRank | None) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter, with those that an adapter adds."""
    every = structure.shapes()
    if adapter is not None:
        for name, shape in adapted(structure, adapter).items():
            every |= added(adapter, name, shape)
    return every


def with_adapters(structure: Structure, adapter: LowRank, rows: Sequence[Partition]) -> tuple[Partition, ...]:
    """Return the partitions of a model's parameters, with those of an adapter's."""
    of_matrices = by_name(rows, [f"{name}.weight" for name in projections(structure)])
    more = [
        beside(of_matrices[f"{projection}.weight"], name, size)
        for projection, shape in adapted(structure, adapter).items()
        for name, size in added(adapter, projection, shape)
        if f"{projection}.weight" in of_matrices
    ]
    return (*rows, *collapse(more))


def beside(of_matrix: Partition, name: str, shape: tuple[int, ...]) -> Partition:
    """Return the partition of a part of an adapter: A is cut as the inputs of its matrix W are, others as its outputs.

    With rows of W on each rank, A x is the same on all ranks, and each has a part of A's gradient from its rows of B.
    With columns of W, each rank has a term of the result, hence of the gradients of B and of DoRA's norms.
    """
    dim = 1 if name.endswith(f".{A}") else 0
    cuts = tuple(one for one in of_matrix.cuts if one.dim == dim)
    row = of_matrix.model_copy(update={"name": name, "count": 1, "shape": shape, "cuts": cuts, "summed_outputs": ()})
    if cuts:
        return row.model_copy(update={"why": "as its matrix"})
    if not of_matrix.cuts:
        return row
    why = "each rank has a part of its gradient, from its part of the matrix"
    return row.model_copy(update={"style": "replicated", "gradients": "summed", "why": why})
