"""What a rank of ``experts.py`` measures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TOP_K = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer of experts and of its batch."""

    experts: int
    hidden: int
    ffn_hidden: int
    tokens: int
    """Tokens of each rank."""


@dataclass(frozen=True)
class Job:
    """Sides that run in turn on the same ranks, partool first."""

    shape: Shape
    sides: tuple[str, ...]
    ranks: int
    skewed: bool = False
    """Whether every token's first choice is one expert, whose load is then experts / 2 times the mean, or 4 if that is
    less."""
    rounds: int = 21
    library: str = ""
    """Path of the compiled allocator that counts."""
    extra_path: str = ""
    """Folder with packages that only a peer needs."""

    @staticmethod
    def read(path: Path) -> Job:
        """Read the job that the ranks get."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return Job(**data | {"shape": Shape(**data["shape"]), "sides": tuple(data["sides"])})
