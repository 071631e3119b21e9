"""The dry run of a plan: figures, and their form on the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from partool.plan.terms import MEMORY_TERMS
from partool.plan.types import Plan
from partool.plan.verification import WARNINGS, Verification, VerifiedRank
from partool.report.units import gib, probability, size
from partool.spec.numbers import GIB, MIB

_OUTSIDE = ("framework", "fragmentation")
_OWNERS = 8
"""Number of owners of tensors that the terminal names."""
_RANKS = 8
"""Most ranks that a line lists."""


@dataclass(frozen=True)
class VerifiedTerm:
    """A memory term of the fullest rank, as predicted and as executed."""

    name: str
    predicted_bytes: int | None
    """None for terms that the planner counts within others."""
    executed_bytes: int


def terms(verification: Verification) -> list[VerifiedTerm]:
    """Return the memory terms of tensors of the fullest rank, the predicted ones first."""
    executed = fullest(verification).terms_bytes
    names = [name for name in MEMORY_TERMS if name not in _OUTSIDE]
    rows = [VerifiedTerm(name, verification.predicted_bytes.get(name, 0), executed.get(name, 0)) for name in names]
    rows += [VerifiedTerm(name, None, size) for name, size in executed.items() if name not in names]
    return [row for row in rows if row.predicted_bytes or row.executed_bytes]


def fullest(verification: Verification) -> VerifiedRank:
    """Return the executed rank whose tensors hold most."""
    return next(rank for rank in verification.ranks if rank.rank == verification.fullest)


def summary(plan: Plan, verification: Verification) -> str:
    """Return which ranks were executed, and what is known of their exchanges."""
    ranks, world = [rank.rank for rank in verification.ranks], plan.layout.mesh.world_size
    some = ", ".join(map(str, ranks[:_RANKS])) + (", …" if len(ranks) > _RANKS else "")
    which = f"All {world} ranks" if len(ranks) == world else f"{len(ranks)} of {world} ranks ({some})"
    which = "The only rank" if world == 1 else which
    exchanges, operators = (
        sum(rank.exchanges for rank in verification.ranks),
        sum(rank.operators for rank in verification.ranks),
    )
    faults = [each for each in verification.findings if each.code not in WARNINGS]
    met = "faults:" if faults else "no rank waits for ever."
    return f"{which} executed {operators:,} operators and {exchanges:,} exchanges with one another; {met}"


def correction(plan: Plan, verification: Verification) -> str:
    """Return the predicted memory before and after its correction by the dry run."""
    before, after = verification.before, plan.prediction.memory
    return (
        f"Memory of the fullest rank: predicted {gib(before.total_bytes)} GiB (rank {before.rank}, "
        f"{before.verdict}, {probability(before.fit_probability)}), by the dry run {gib(after.total_bytes)} GiB "
        f"(rank {after.rank}, {after.verdict}, {probability(after.fit_probability)})."
    )


def render_verification(plan: Plan, console: Console) -> None:
    """Print what a dry run found; nothing for a plan without one."""
    verification = plan.verification
    if verification is None:
        return
    console.print()
    console.print(Text("Dry run", "bold"))
    _say(console, f"Not executed: {verification.not_executed}.")
    _say(console, summary(plan, verification))
    for finding in verification.findings:
        places = f" ({', '.join(finding.places)})" if finding.places else ""
        _say(console, f"{'!' if finding.code in WARNINGS else '✗'} {finding.code} {finding.message}{places}")
    _say(console, correction(plan, verification))
    console.print()
    console.print(_table(plan, verification))
    console.print()
    console.print(_largest(verification))


def _say(console: Console, text: str) -> None:
    """Print a paragraph; lines after the first are indented, too."""
    console.print(Padding(Text(text), (0, 0, 0, 1)))


def _table(plan: Plan, verification: Verification) -> Table:
    most = fullest(verification)
    unit, name = (GIB, "GiB") if most.peak_bytes >= GIB // 10 else (MIB, "MiB")
    table = Table(title=f"Tensors of rank {most.rank} at its peak", title_justify="left", title_style="bold", box=None)
    table.add_column("term")
    for heading in ("predicted", "executed"):
        table.add_column(f"{heading} {name}", justify="right")
    for row in terms(verification):
        predicted = "in activations" if row.predicted_bytes is None else _number(row.predicted_bytes, unit)
        table.add_row(row.name, predicted, _number(row.executed_bytes, unit))
    predicted_bytes = sum(row.predicted_bytes or 0 for row in terms(verification))
    table.add_row("tensors", _number(predicted_bytes, unit), _number(most.peak_bytes, unit))
    if plan.devices.backend != "cpu":
        table.add_row("reserved, modelled", "", _number(most.reserved_bytes, unit))
    return table


def _number(size_bytes: int, unit: int) -> str:
    return f"{size_bytes / unit:.2f}"


def _largest(verification: Verification) -> Table:
    """Return the owners of tensors that hold most at the peak."""
    table = Table(title="Held most at the peak", title_justify="left", title_style="bold", box=None)
    for name in ("module", "operator", "term"):
        table.add_column(name)
    for name in ("tensors", "size"):
        table.add_column(name, justify="right")
    for owner in verification.owners[:_OWNERS]:
        operator = owner.operator.partition("::")[2] or owner.operator
        table.add_row(owner.module or "–", operator, owner.term, str(owner.tensors), size(owner.size_bytes))
    return table
