"""Matrices that an adapter trains beside those of a model, as pure data: their names, shapes and frozen neighbours.

Beside ``layers.{i}.attention.q.weight [O, I]`` lie ``layers.{i}.attention.q.lora_a [r, I]`` and ``….lora_b [O, r]``.
Those of a layer's experts are stacked as the experts' matrices are: ``….experts.up.lora_a [E·r, I]``, expert after
expert, and ``….experts.up.lora_b [E·O, r]``. DoRA adds ``….attention.q.magnitude [O]``, but none for experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from partool.spec.adapter import LowRank

A, B, MAGNITUDE = "lora_a", "lora_b", "magnitude"
_WEIGHT = ".weight"
Short = Mapping[str, tuple[str, ...]]
SHORT: Short = {"embed": ("embed.weight",), "head": ("head.weight",), "norms": ("*norm.weight", "*norm.bias")}
"""Short names in ``adapter.train``, and the patterns that they stand for."""


def is_adapter(name: str) -> bool:
    """Return True if a parameter belongs to an adapter."""
    return name.endswith((f".{A}", f".{B}", f".{MAGNITUDE}"))


def is_target(adapter: LowRank, projection: str) -> bool:
    """Return True if a projection of a layer, such as ``layers.0.attention.q``, gets an adapter."""
    return adapter.targets == "all-linear" or any(_matches(projection, pattern) for pattern in adapter.targets)


def _matches(projection: str, pattern: str) -> bool:
    last = projection.rpartition(".")[2].removesuffix("_proj")
    return last == pattern.removesuffix("_proj") or fnmatchcase(projection, pattern.removesuffix(_WEIGHT))


def unmatched_targets(adapter: LowRank, projections: Collection[str]) -> list[str]:
    """Return the patterns of ``adapter.targets`` that match no projection."""
    patterns = [] if adapter.targets == "all-linear" else adapter.targets
    return [pattern for pattern in patterns if not any(_matches(name, pattern) for name in projections)]


def added(
    adapter: LowRank, projection: str, shape: tuple[int, int], matrices: int = 1
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of what an adapter adds to a projection; ``matrices`` are stacked row under row."""
    rows, columns = shape
    yield f"{projection}.{A}", (matrices * adapter.rank, columns)
    yield f"{projection}.{B}", (rows, adapter.rank)
    if adapter.kind == "dora" and matrices == 1:
        yield f"{projection}.{MAGNITUDE}", (rows,)


def train_patterns(train: Collection[str], short: Short = SHORT) -> list[tuple[str, tuple[str, ...]]]:
    """Return each entry of ``adapter.train`` with the patterns of names that it stands for.

    ``short`` has the short names and their patterns; the default is that of partool's decoder.
    """
    return [(entry, short.get(entry, (entry,))) for entry in train]


def frozen_beside(names: Collection[str], train: Collection[str], short: Short = SHORT) -> tuple[str, ...]:
    """Return patterns of the parameters that stay as they are beside an adapter, in the order of ``names``.

    They match neither the adapter's parameters nor those of ``adapter.train``; layers are merged where they are alike.
    """
    patterns = [pattern for _, patterns in train_patterns(train, short) for pattern in patterns]
    trained = {name for name in names if is_adapter(name) or any(fnmatchcase(name, each) for each in patterns)}
    frozen: dict[str, None] = {}
    for name in names:
        if name not in trained:
            alike = ".".join("*" if part.isdigit() else part for part in name.split("."))
            frozen[name if any(fnmatchcase(each, alike) for each in trained) else alike] = None
    return tuple(frozen)
