"""Hanayo and ZB-V, whose stages run back and forth over the ranks (waves); a search makes their action lists."""

from __future__ import annotations

from typing import NamedTuple

from partool.schedule.actions import Order
from partool.schedule.listing import (
    UNITS,
    Listed,
    Policy,
    Rule,
    backward_first,
    forward_first,
    in_turns,
    listed,
    paced,
)


class _Recipe(NamedTuple):
    """Settings (a recipe) from which :meth:`policy` makes a policy for any number of micro-batches."""

    rule: Rule
    share: float
    """Maximum number of micro-batches in flight, as a multiple of ``cap``."""
    spare: bool = False
    cap: int = 0
    """Maximum memory, in units of one micro-batch's activations; 0 means no bound."""

    def policy(self, micro_batches: int, chunks: int) -> Policy:
        """Return the policy for ``micro_batches`` micro-batches and ``chunks`` stages per rank."""
        if self.cap and self.cap < micro_batches:
            admitted = min(micro_batches, max(1, int(self.share * self.cap)))
            return Policy(self.rule, admitted, self.cap * chunks, self.spare)
        return Policy(self.rule, micro_batches, micro_batches * chunks)


_TRIED = (
    _Recipe(in_turns, 2.0),
    _Recipe(in_turns, 2.0, spare=True),
    _Recipe(in_turns, 1.5),
    _Recipe(paced(0.5), 2.0),
    _Recipe(paced(0.4), 1.5),
    _Recipe(paced(0.25), 1.5),
    _Recipe(paced(0.33), 2.0),
    _Recipe(paced(0.7), 1.5),
    _Recipe(paced(1.0), 2.0),
    _Recipe(backward_first, 2.0),
    _Recipe(forward_first, 2.0),
)
"""Recipes that were selected out of 104 combinations: without any of them, the best list of at least one of 439 sizes
(up to 8 ranks, 4 waves, M = 6 P, from half the memory of 1F1B on) gets longer. Their lists are 0.3 % longer than the
best list of all combinations on average, 6 % at worst; the paper's lists are 19 % and 54 % longer. The first three
recipes find the list with little memory where many lists are equally fast, and the list of ZB-V."""
_WORTH = 1.01
"""Factor by which a list may take longer in exchange for less memory, if memory is not bounded."""
_FULL = 5
"""Number of recipes that are tried on all micro-batches, the best of a trial of all recipes on few micro-batches."""


def wave_rank(stage: int, ranks: int) -> int:
    """Return the rank of a stage if stages run back and forth over the ranks (Liu et al., Hanayo, SC'23, section 3)."""
    place = stage % (2 * ranks)
    return place if place < ranks else 2 * ranks - 1 - place


def hanayo(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
    """Return Hanayo's order with ``chunks / 2`` waves (Liu et al., SC'23).

    For at most as many micro-batches as ranks this is the paper's list: the first action that can start, backward
    passes before the deepest forward pass. For more micro-batches, where the paper's list leaves ranks idle between
    rounds, it is the shortest of several in units of F = 1, B = 2, never longer than the paper's list. ``cap`` bounds
    the activations on a rank, in units of one micro-batch's activations; 0 sets no bound, but no memory is spent to
    make the list less than 1 % shorter.
    """
    if micro_batches <= ranks and (not cap or cap >= micro_batches):
        return wave(ranks, micro_batches, chunks, cap).order
    return _searched(ranks, micro_batches, chunks, cap, split=False).order


def zb_v(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
    """Return ZB-V (Qi et al., arXiv 2405.15362): two stages per rank in a V; weight gradients fill otherwise idle time.

    ``cap`` bounds the activations on a rank, held until the weight gradients are computed, in units of one
    micro-batch's activations; 0 means the number of ranks, the memory of 1F1B. The list is found by the search of
    :func:`hanayo`, with F = I = W = 1.
    """
    return _searched(ranks, micro_batches, chunks, cap or ranks, split=True).order


def wave(ranks: int, micro_batches: int, chunks: int, cap: int = 0) -> Listed:
    """Return the list of the Hanayo paper; ``cap`` bounds the micro-batches in flight (0 means no bound)."""
    policy = _paper(cap).policy(micro_batches, chunks)
    return listed(_placement(ranks, chunks), ranks, micro_batches, policy, split=False)


def shortest(ranks: int, micro_batches: int, chunks: int, *, split: bool) -> int:
    """Return a time that no action lists of these sizes can undercut, in the units of ``listing.UNITS``.

    Rank ``r`` waits for ``r`` forward passes before it begins. Its last backward pass is followed by ``r`` others,
    unless weight gradients may be postponed until after that pass.
    """
    work = chunks * micro_batches * (UNITS["F"] + UNITS["B"])
    return work + (ranks - 1) * (UNITS["F"] if split else UNITS["F"] + UNITS["B"])


def _placement(ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(wave_rank(stage, ranks) for stage in range(ranks * chunks))


def _recipes(ranks: int, cap: int) -> list[_Recipe]:
    """Return the recipes to try: the paper's recipe, then others from least to most memory (less may be faster)."""
    rooms = {room for room in (ranks + 1, ranks + ranks // 2, 2 * ranks) if not cap or room < cap}
    return [_paper(cap), *(recipe._replace(cap=room) for room in (*sorted(rooms), cap) for recipe in _TRIED)]


def _paper(cap: int) -> _Recipe:
    return _Recipe(backward_first, 1.0, cap=cap)


def _searched(ranks: int, micro_batches: int, chunks: int, cap: int, *, split: bool) -> Listed:
    """Return the best lists found. Trials on two to three rounds select the recipes for all micro-batches."""
    few = micro_batches - max(0, (micro_batches - 2 * ranks - 1) // ranks) * ranks
    recipes = _recipes(ranks, cap)
    if few < micro_batches:
        # All recipes are tried: many are optimal on few micro-batches but not on more.
        trial = _tried((ranks, few, chunks), recipes, split=split)
        recipes = [_paper(cap), *sorted(trial, key=lambda recipe: trial[recipe][:2])[:_FULL]]
    least = shortest(ranks, micro_batches, chunks, split=split)
    results = _tried((ranks, micro_batches, chunks), recipes, split=split, enough=least)
    return min(results.values(), key=lambda one: _score(one, results, cap))


def _tried(
    sizes: tuple[int, int, int], recipes: list[_Recipe], *, split: bool, enough: int = 0
) -> dict[_Recipe, Listed]:
    """Return recipe → its action lists, in the order of ``recipes``; stop after lists that take at most ``enough``.

    ``sizes`` are ranks, micro-batches and stages per rank.
    """
    ranks, micro_batches, chunks = sizes
    results: dict[_Recipe, Listed] = {}
    policies = set()
    for recipe in recipes:
        policy = recipe.policy(micro_batches, chunks)
        if policy not in policies:
            policies.add(policy)
            results[recipe] = listed(_placement(ranks, chunks), ranks, micro_batches, policy, split=split)
            if results[recipe].time <= enough:
                break
    return results


def _score(one: Listed, results: dict[_Recipe, Listed], cap: int) -> tuple[int, int, int]:
    """Return the sort key of one result: time before memory, but memory for fast results if memory is not bounded."""
    if cap:
        return 0, one.time, one.peak
    paper = results[_paper(cap)].time
    enough = min(_WORTH * min(other.time for other in results.values()), paper)
    return (0, one.peak, one.time) if one.time <= enough else (1, one.time, one.peak)
