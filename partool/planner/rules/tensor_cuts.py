"""Partition of the model over tensor-parallel ranks, and rules about the partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partool.diagnostics.record import Diagnostic
from partool.layout.tensor import Decided, Partition, apply_patterns, own_partition
from partool.plan.layout import Layout
from partool.planner.described import Description
from partool.planner.problem import Problem
from partool.spec.spec import Spec

_PATH = ("parallel", "tensor")
_UNDECIDED = "PT442"


def partition(problem: Problem, layout: Layout) -> Decided:
    """Return the partition of each parameter over the tensor ranks of a layout, and findings about it.

    With one tensor rank the partition has no rows.
    """
    ranks, inner = layout.mesh.tp, layout.tensor.inner
    decided = _decided(problem, ranks, inner, layout.tensor.sequence_norms, layout.expert)
    return Decided(decided.rows, (*decided.findings, *_idle(decided.rows, ranks // inner, ranks)))


def check_tensor(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about patterns that cannot apply, and modules without a rule; ``auto`` is checked as two ranks."""
    tensor = problem.spec.parallel.tensor
    ranks = 2 if tensor.degree == "auto" or problem.world_size % tensor.degree else tensor.degree
    if ranks > 1 or tensor.patterns:
        yield from _decided(problem, ranks).findings


def cuttable(problem: Problem, ranks: int) -> bool:
    """Return False if a model that transformers builds cannot be cut over ``ranks`` tensor ranks."""
    if problem.described is None or ranks == 1:
        return True
    return not any(one.severity == "error" for one in _decided(problem, ranks).findings)


def without_tensor(spec: Spec, described: Description) -> tuple[Spec, list[Diagnostic]]:
    """Return the spec without tensor parallelism if the model cannot be cut, else unchanged; also return findings.

    Only a tensor degree of ``auto`` is replaced, by 1; the finding is then a warning that names an uncovered module.
    """
    tensor = spec.parallel.tensor
    if tensor.degree != "auto":
        return spec, []
    unclear = [one for one in described.decided(2, tensor.patterns).findings if one.code == _UNDECIDED]
    if not unclear:
        return spec, []
    more = f", and {len(unclear) - 1} more" if len(unclear) > 1 else ""
    message = f"no tensor parallelism is tried: {unclear[0].message}{more}"
    finding = Diagnostic("PT445", message, severity="warning", path=_PATH, help=unclear[0].help)
    parallel = spec.parallel.model_copy(update={"tensor": tensor.model_copy(update={"degree": 1})})
    return spec.model_copy(update={"parallel": parallel}), [finding]


def _decided(problem: Problem, ranks: int, inner: int = 1, sequence_norms: bool = False, expert: int = 1) -> Decided:
    patterns = problem.spec.parallel.tensor.patterns
    if problem.described is not None:
        adapter = problem.spec.adapter
        return problem.described.decided(ranks, patterns, None if adapter is None else adapter.form)
    rows = own_partition(problem.model, ranks, inner, sequence_norms, expert)
    return Decided(*apply_patterns(problem.model, rows, patterns))


def _idle(rows: Sequence[Partition], outer: int, ranks: int) -> Iterator[Diagnostic]:
    """Yield a finding if some tensor ranks idle because they hold no part of a matrix that other ranks compute with."""
    without = {
        row.name: empty
        for row in rows
        for empty in [max((sum(not rank_range for rank_range in cut.ranges) for cut in row.cuts), default=0)]
        if empty and row.style in ("column", "vocabulary") and not row.name.endswith(".bias")
    }
    if without:
        name, empty = max(without.items(), key=lambda item: item[1])
        more = f" and of {len(without) - 1} more" if len(without) > 1 else ""
        message = f"{empty} of {ranks} tensor ranks have no part of {name}{more}, and wait for the others"
        help = f"use tensor: {outer - empty * outer // ranks} or fewer"
        yield Diagnostic("PT444", message, severity="warning", path=_PATH, help=help)
