"""Checks of a plan by dry runs of its ranks (:func:`verified`).

Collectives and messages must meet each other (:func:`mismatches`), and no ranks may wait for each other in a circle
(:func:`stuck`). Only some ranks need a trace (:func:`differing_ranks`).
"""

from __future__ import annotations

from partool.verify.execute import DryProgress, DryRunError
from partool.verify.findings import ExchangeFinding
from partool.verify.matching import mismatches
from partool.verify.ranks import differing_ranks
from partool.verify.verification import verified
from partool.verify.waits import stuck

__all__ = ["DryProgress", "DryRunError", "ExchangeFinding", "differing_ranks", "mismatches", "stuck", "verified"]
