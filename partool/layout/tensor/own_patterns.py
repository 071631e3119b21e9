"""Patterns for partool's own decoder, whose layers are written for one way to cut them."""

from __future__ import annotations

from collections.abc import Iterable

from partool.diagnostics.record import Diagnostic
from partool.layout.parameters import parameters
from partool.layout.tensor.cutting import collapsed_name
from partool.layout.tensor.patterns import PATH, Patterns, matching, unmatched
from partool.layout.tensor.types import Partition
from partool.spec.model import ModelConfig
from partool.spec.parallel import TensorPattern


def apply_patterns(
    config: ModelConfig, rows: Iterable[Partition], patterns: Patterns
) -> tuple[tuple[Partition, ...], tuple[Diagnostic, ...]]:
    """Return the rows of :func:`own_partition` with the patterns that agree with them as their rule; findings."""
    rows = tuple(rows)
    if not patterns:
        return rows, ()
    infos = parameters(config)
    findings = {finding.message: finding for finding in unmatched(patterns, [info.name for info in infos])}
    one = {collapsed_name(info.name): info.name for info in infos} | {info.name: info.name for info in infos}
    found = []
    for row in rows:
        pattern = matching(patterns, one[row.name])
        biased = row.name.endswith(".bias") and not row.name.endswith("norm.bias")
        if pattern is None or biased:
            # A bias lies as its matrix leads it to.
            found.append(row)
            continue
        if patterns[pattern] in (row.style, TensorPattern(style=row.style)):
            found.append(row.model_copy(update={"rule": f"pattern {pattern!r}"}))
            continue
        found.append(row)
        message = f"pattern {pattern!r} does not say {row.style} of {row.name}, and it can be cut no other way"
        help = "drop the pattern; models that transformers builds (model.hf) can be cut in other ways"
        findings.setdefault(message, Diagnostic("PT443", message, path=(*PATH, pattern), help=help))
    return tuple(found), tuple(findings.values())
