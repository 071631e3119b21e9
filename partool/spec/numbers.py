"""Numbers of specs, and of the plans made of them: how large each kind may be, written once.

The limits lie far above anything built and below where arithmetic overflows or work grows without end, so a misplaced
unit or a slip of the keyboard is said at once.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

_UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def duration_s(text: str) -> float | None:
    """Return the seconds of a positive duration such as ``90s``, ``30min`` or ``1.5h``; None for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.ASCII)
    if match is None or match[2] not in _UNITS_S:
        return None
    return float(match[1]) * _UNITS_S[match[2]] or None


MIB, GIB = 2**20, 2**30

MOST_DEVICES = 500_000
"""Twice the largest cluster that anyone has named in 2026; beyond it a slip of the keyboard is likelier."""

MOST_LAYERS = 1_000

Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
"""Number of layers, or of what comes once per layer; each is planned by itself."""
LayersOrNone = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Width = Annotated[int, Field(gt=0, le=1_000_000)]
"""Columns of a matrix: ten times the widest of any model that was published."""
Heads = Annotated[int, Field(gt=0, le=10_000)]
Experts = Annotated[int, Field(gt=0, le=10_000)]
ExpertsOrNone = Annotated[int, Field(ge=0, le=10_000)]
Vocabulary = Annotated[int, Field(gt=0, le=100_000_000)]
"""A hundred times the largest tokenizer."""
TokenId = Annotated[int, Field(ge=0, lt=100_000_000)]
"""One of a vocabulary."""
Tokens = Annotated[int, Field(gt=0, le=1_000_000_000)]
"""Of one sequence: ten times the longest context that was announced."""
TokensOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Sequences = Annotated[int, Field(gt=0, le=1_000_000_000)]
"""In one step."""
Elements = Annotated[int, Field(ge=0, le=1_000_000_000_000)]
"""Of one parameter: a vocabulary times a width is less."""
Ranks = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
Rank = Annotated[int, Field(ge=0, lt=MOST_DEVICES)]
TensorRanks = Annotated[int, Field(gt=0, le=1_024)]
"""Plans list what each of them holds of every parameter; published runs had up to 72."""
Pieces = Annotated[int, Field(gt=0, le=1_024)]
"""Of one thing that is cut, or of which several are on their way."""
Cores = Annotated[int, Field(gt=0, le=1_000_000)]
CoresOrNone = Annotated[int, Field(ge=0, le=1_000_000)]
Steps = Annotated[int, Field(gt=0, le=1_000_000_000)]
StepsOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Times = Annotated[int, Field(gt=0, le=1_000_000)]
"""How often something may happen."""
TimesOrNone = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[int, Field(gt=0, le=100_000_000)]
"""Three years."""
SecondsOrNone = Annotated[int, Field(ge=0, le=100_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]
"""Of memory, or of what moves."""
Predicted = Annotated[int, Field(ge=0, le=10**30)]
"""Of bytes and layouts, of what may be far too large."""
Rate = Annotated[float, Field(ge=0.0, le=1e30)]
"""Per second, and seconds."""
Speed = Annotated[float, Field(ge=1.0, le=1e30)]
"""Operations or bytes per second: what is divided by."""
Figure = Annotated[float, Field(gt=0.0, le=1e6)]
"""Of hardware, in the unit that its name says."""
Factor = Annotated[float, Field(gt=0.0, le=1e12)]
"""What a formula multiplies or compares with."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
FactorOrNone = Annotated[float, Field(ge=0.0, le=1e12)]
