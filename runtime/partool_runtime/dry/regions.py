"""Finds the parts of a rank's action list that repeat, and pairs them with the list of fewer micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partool.schedule import COMPUTE, Action, Schedule
from partool_runtime.parallel.pipeline.program import compile_program, halved

LEAST = 4
"""Least number of repetitions of a region: the first and the last are special, the two between are compared."""
_LONGEST = 256
"""Most actions of one repetition."""


class Token(NamedTuple):
    """A compute action and the transfers up to the next one."""

    kind: str
    stage: int
    micro_batch: int
    transfers: tuple[tuple[str, int, int], ...]
    """Kind, stage, and micro-batch minus the compute action's; ``POST`` for a receive that is posted."""


@dataclass(frozen=True, slots=True)
class Region:
    """``times`` repetitions of the ``width`` tokens that begin at ``start``; one token for ``times`` 1."""

    start: int
    width: int
    times: int


def tokens_of(schedule: Schedule, rank: int) -> tuple[tuple[str, ...], list[Token]]:
    """Return the kinds of transfers before a rank's first compute action, and its compute actions."""
    program = compile_program(schedule, rank, halved(schedule))
    lead: list[str] = []
    computed: list[tuple[Action, list[tuple[str, int, int]]]] = []
    for step in program.steps:
        happening = [("POST", program.inbound[sender][place]) for sender, place in step.posts]
        if step.action.kind.startswith("SEND"):
            happening.append((step.action.kind, step.action))
        for kind, action in happening:
            if computed:
                computed[-1][1].append((f"{kind} {action.kind}", action.stage, action.micro_batch))
            else:
                lead.append(f"{kind} {action.kind} {action.stage} {action.micro_batch}")
        if step.action.kind in COMPUTE:
            computed.append((step.action, []))
    return tuple(lead), [
        Token(*action, tuple((kind, stage, batch - action.micro_batch) for kind, stage, batch in transfers))
        for action, transfers in computed
    ]


def regions_of(tokens: Sequence[Token]) -> list[Region]:
    """Return the tokens as regions, from the first on each of the largest extent that :data:`LEAST` repetitions have.

    The micro-batches of a repetition's actions are those of the previous one plus a constant.
    """
    regions: list[Region] = []
    at = 0
    while at < len(tokens):
        best = Region(at, 1, 1)
        for width in range(1, min(_LONGEST, (len(tokens) - at) // LEAST) + 1):
            times = _repetitions(tokens, at, width)
            if times >= LEAST and times * width > best.times * best.width:
                best = Region(at, width, times)
        regions.append(best)
        at += best.width * best.times
    return regions


def _repetitions(tokens: Sequence[Token], start: int, width: int) -> int:
    ahead = tokens[start + width].micro_batch - tokens[start].micro_batch
    at = start + width
    while at < len(tokens) and _follows(tokens[at - width], tokens[at], ahead):
        at += 1
    return (at - start) // width if ahead > 0 else 1


def _follows(before: Token, after: Token, ahead: int) -> bool:
    if before.micro_batch + ahead != after.micro_batch:
        return False
    return before[:2] == after[:2] and before.transfers == after.transfers


class Pairing(NamedTuple):
    """How the tokens of a short list stand for those of a whole list."""

    templates: list[int]
    """For each token of the whole list, the place of the token that stands for it."""
    compared: list[tuple[int, int]]
    """Places of tokens that must have done the same: those that stand for several tokens, and those before them."""


def paired(short: Sequence[Token], full: Sequence[Token]) -> Pairing | None:
    """Pair the lists; the additional repetitions of a region are those of the short list's last repetition but one.

    None if the lists do not consist of the same regions.
    """
    ours, theirs = regions_of(short), regions_of(full)
    if len(ours) != len(theirs):
        return None
    pairing = Pairing([], [])
    for mine, other in zip(ours, theirs, strict=True):
        alike = mine.width == other.width and other.times >= mine.times and (mine.times > 1 or other.times == 1)
        if not alike or not _equal(short, mine, full, other):
            return None
        for repetition in repeated(mine.times, other.times):
            first = mine.start + repetition * mine.width
            pairing.templates.extend(range(first, first + mine.width))
        if other.times > mine.times:
            first = mine.start + (mine.times - 2) * mine.width
            pairing.compared.extend((first + at - mine.width, first + at) for at in range(mine.width))
    return pairing


def _equal(short: Sequence[Token], mine: Region, full: Sequence[Token], other: Region) -> bool:
    return all(
        _shape(short[mine.start + at], mine.times) == _shape(full[other.start + at], mine.times)
        for at in range(mine.width)
    )


def _shape(token: Token, times: int) -> tuple[str, int, object]:
    """Transfers between repeated passes and those before or after them are of micro-batches far from each other."""
    transfers = token.transfers if times > 1 else [each[:2] for each in token.transfers]
    return token.kind, token.stage, transfers


def repeated(times: int, wanted: int) -> list[int]:
    """Return which of ``times`` repetitions stand for ``wanted`` ones: the last but one stands for the additional."""
    if times == wanted:
        return list(range(times))
    return [*range(times - 1), *[times - 2] * (wanted - times), times - 1]
