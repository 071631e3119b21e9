"""Types of the numbers in specs and plans; each type has a lower and an upper limit.

The limits lie far above any real training and below values where arithmetic overflows or work grows without end, so
that a wrong unit or a typing error is reported at once.
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


def duration(value_s: float) -> str:
    """Return a length of time in its two largest units: ``42 s``, ``3 min 5 s``, ``2 h 7 min``, ``46 days 3 h``.

    A zero in the second place is left out; negative values count as 0.
    """
    remaining_s, parts = max(0, round(value_s)), list[str]()
    for unit_s, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        count, remaining_s = divmod(remaining_s, unit_s)
        if parts or count or unit == "s":
            parts.append(f"{count} {unit.removesuffix('s') if unit == 'days' and count == 1 else unit}")
    return " ".join(part for index, part in enumerate(parts[:2]) if index == 0 or not part.startswith("0 "))


MIB, GIB = 2**20, 2**30

MOST_DEVICES = 500_000
"""Twice the largest cluster announced by 2026; a larger number is more likely a typing error."""

MOST_LAYERS = 1_000

Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
"""Number of layers, stages or chunks; the planner treats each layer by itself."""
Depth = Annotated[int, Field(gt=0, le=16)]
"""Further tokens that a position predicts; published models have 1 to 3 modules for them."""
LayersOrNone = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Width = Annotated[int, Field(gt=0, le=1_000_000)]
"""Columns of a matrix; the limit is ten times the widest of any published model."""
Heads = Annotated[int, Field(gt=0, le=10_000)]
Experts = Annotated[int, Field(gt=0, le=10_000)]
ExpertsOrNone = Annotated[int, Field(ge=0, le=10_000)]
Vocabulary = Annotated[int, Field(gt=0, le=100_000_000)]
"""Tokens of a vocabulary; the limit is a hundred times the largest tokenizer."""
TokenId = Annotated[int, Field(ge=0, lt=100_000_000)]
"""Number of a token in the vocabulary."""
Tokens = Annotated[int, Field(gt=0, le=1_000_000_000)]
"""Tokens of one sequence; the limit is ten times the longest context announced."""
TokensOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Sequences = Annotated[int, Field(gt=0, le=1_000_000_000)]
"""Sequences in one step."""
TrainedTokens = Annotated[int, Field(gt=0, le=10**18)]
"""Tokens of a whole training; the limit is ten thousand times the longest announced."""
Epochs = Annotated[float, Field(gt=0.0, le=1e6)]
Elements = Annotated[int, Field(ge=0, le=1_000_000_000_000)]
"""Elements of one parameter; real embeddings (vocabulary times width) have fewer than the limit."""
Ranks = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
Rank = Annotated[int, Field(ge=0, lt=MOST_DEVICES)]
TensorRanks = Annotated[int, Field(gt=0, le=1_024)]
"""Number of tensor-parallel ranks. Plans list each rank's part of every parameter, so the number is limited;
published runs had up to 72 ranks."""
Pieces = Annotated[int, Field(gt=0, le=1_024)]
"""Number of pieces into which something is cut, or number of pieces in flight."""
Cores = Annotated[int, Field(gt=0, le=1_000_000)]
CoresOrNone = Annotated[int, Field(ge=0, le=1_000_000)]
MOST_STEPS = 1_000_000_000
Steps = Annotated[int, Field(gt=0, le=MOST_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Times = Annotated[int, Field(gt=0, le=1_000_000)]
"""Number of times that something may happen."""
TimesOrNone = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[int, Field(gt=0, le=100_000_000)]
"""Seconds, at most three years."""
SecondsOrNone = Annotated[int, Field(ge=0, le=100_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]
"""Bytes of memory or of messages."""
Predicted = Annotated[int, Field(ge=0, le=10**30)]
"""Predicted bytes, or a number of layouts; the limit is high because predicted plans may be far too large."""
Rate = Annotated[float, Field(ge=0.0, le=1e30)]
"""Amount per second, or a time in seconds; 0 is allowed."""
Speed = Annotated[float, Field(ge=1.0, le=1e30)]
"""Operations or bytes per second; at least 1, as formulas divide by it."""
Figure = Annotated[float, Field(gt=0.0, le=1e6)]
"""Performance figure of the hardware, in the unit that the field's name ends with."""
Factor = Annotated[float, Field(gt=0.0, le=1e12)]
"""Factor or threshold in a formula."""
Coefficient = Annotated[float, Field(ge=0.0, le=1e6)]
"""Factor of a term in a sum; 0 leaves the term out."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
FactorOrNone = Annotated[float, Field(ge=0.0, le=1e12)]
