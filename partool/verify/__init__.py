"""Checks of what the ranks of a plan do in a step, from the traces of their dry runs.

Collectives and messages must meet each other (:func:`mismatches`), and no ranks may wait for each other in a circle
(:func:`stuck`). Only some ranks need a trace (:func:`differing_ranks`).
"""

from __future__ import annotations

from partool.verify.findings import ExchangeFinding
from partool.verify.matching import mismatches
from partool.verify.ranks import differing_ranks
from partool.verify.waits import stuck

__all__ = ["ExchangeFinding", "differing_ranks", "mismatches", "stuck"]
