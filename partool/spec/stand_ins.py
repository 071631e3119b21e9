"""Checks the rest of a spec in which values were refused: defaults stand in for the refused values.

Each round checks the spec with stand-ins and keeps the findings that do not depend on them
(:mod:`partool.spec.watched`). Errors among them are refused values of the next round, so that a rule which needs them
to be right runs as well, until a round finds no further error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from partool.diagnostics.record import Diagnostic
from partool.spec import _pydantic
from partool.spec._source import SpecPath
from partool.spec.spec import Spec
from partool.spec.watched import standing_in, watched

REQUIRED: dict[str, Any] = {"model": {"layers": 1, "hidden": 2, "heads": 1, "vocab": 256}, "data": "python-stdlib"}
"""Values of the sections that have no default."""
_ROUNDS = 8
"""Largest number of rounds; each finds an error that the rounds before did not see."""


@dataclass
class Rest:
    """A document without the values that were refused, and what was found in it."""

    document: dict[str, Any]
    refused: frozenset[SpecPath] = frozenset()
    """Paths at which defaults stand in for what the user wrote."""
    spec: Spec | None = None
    """The spec with stand-ins; None if nothing is left that can be checked."""

    def doubting(self, paths: Iterable[SpecPath]) -> Rest:
        """Return the rest in which the values at ``paths`` are perhaps not those that the user meant."""
        return replace(self, refused=self.refused.union(paths))

    def without(self, paths: Iterable[SpecPath]) -> Rest:
        """Return the rest with defaults in place of the values at further ``paths``.

        Where a section cannot do without a refused value, defaults stand in for the section.
        """
        document, refused = copy.deepcopy(self.document), set(self.refused)
        pending = {_whole_list(path) for path in paths}
        for _ in range(_ROUNDS):
            if () in pending:  # an error of the document as a whole
                break
            refused |= {_remove(document, path) for path in pending} | pending
            try:
                return Rest(document, frozenset(refused), Spec.model_validate(REQUIRED | document))
            except ValidationError as error:
                wrong = {_whole_list(finding.path) for finding in _pydantic.findings(error, document)}
                pending = wrong - refused or {path[:-1] for path in wrong}
        return Rest(document, frozenset({*refused, ()}))


def remaining(
    rest: Rest, rules: Callable[[Spec], list[Diagnostic]], seen: Iterable[Diagnostic] = ()
) -> tuple[Rest, list[Diagnostic]]:
    """Return the findings of ``rules`` that do not depend on refused values, and the rest without their errors.

    Findings that ``seen`` holds already are left out.
    """
    reported = {(finding.code, finding.path, finding.message) for finding in seen}
    findings: list[Diagnostic] = []
    for _ in range(_ROUNDS):
        if rest.spec is None:
            break
        with standing_in(rest.refused) as stand_ins:
            round_findings = rules(watched(rest.spec))
        for finding in round_findings:
            if (finding.code, finding.path, finding.message) not in reported:
                reported.add((finding.code, finding.path, finding.message))
                findings.append(finding)
        errors = {finding.path for finding in (*round_findings, *stand_ins.left_out) if finding.severity == "error"}
        # An error that stays although a default stands in is one of the section around it.
        new = errors - rest.refused or {path[:-1] for path in errors if len(path) > 1} - rest.refused
        if not new:
            break
        rest = rest.without(new)
    return rest, findings


def _whole_list(path: SpecPath) -> SpecPath:
    """Return the path of the list that holds an item; a default stands in for all of it."""
    return next((path[:at] for at, part in enumerate(path) if isinstance(part, int)), path)


def _remove(document: dict[str, Any], path: SpecPath) -> SpecPath:
    """Remove the value at a path, if it is written; a section that is one bare value goes with it.

    Returns the path of what a default stands in for.
    """
    section: dict[str, Any] = document
    for depth, part in enumerate(path[:-1]):
        inside = section.get(str(part))
        if not isinstance(inside, dict):
            section.pop(str(part), None)
            return path[: depth + 1] if inside is not None else path
        section = inside
    section.pop(str(path[-1]), None)
    return path
