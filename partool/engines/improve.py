"""Compares a plan with the best one that its training system can do, in that system's own words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from partool.engines.settings import Setting
from partool.engines.write import WRITABLE, terms_of
from partool.engines.written import EngineChange, EngineTerms, changes
from partool.plan.diff import differences
from partool.plan.types import Plan
from partool.planner.explain.scored import score_beside
from partool.spec.parallel import ParallelSpec
from partool.spec.spec import Spec

_KEPT = ("tensor.patterns", "offload.dir", "offload.buffers", "data.leaves")
"""Fields of ``parallel`` that describe the model or the machines rather than choose a layout."""

LEAST_GAIN = 0.05
"""Share by which a score has to be better to be worth a change of a run's settings; a stated constant."""
_FITS = 0.9
"""Probability of fitting from which a plan counts as one that fits."""


@dataclass(frozen=True)
class Advice:
    """A plan beside the best plan for the same engine."""

    before: Plan | None
    """The plan as it is pinned; None if it does not fit or is wrong."""
    after: Plan
    changes: tuple[EngineChange, ...]
    """What to change to come from the one to the other; all settings if there is no plan before."""
    scores_s: tuple[float, float]
    """Scores of both in seconds for somebody who runs the plan before, so that only new mechanisms count as risks."""

    @property
    def faster(self) -> float:
        """Relative gain in step time, 0.1 for a step that takes 1 / 1.1 of the time; 0 if there is no plan before."""
        if self.before is None:
            return 0.0
        return self.before.prediction.time.step_time_s / self.after.prediction.time.step_time_s - 1.0

    @property
    def safer(self) -> bool:
        """True if only the later plan fits with 90 % or more."""
        if self.before is None:
            return True
        was, now = (plan.prediction.memory.fit_probability for plan in (self.before, self.after))
        return was < _FITS <= now

    @property
    def worth_it(self) -> bool:
        """True if the change makes the run safer, or its score better by :data:`LEAST_GAIN`."""
        before_s, after_s = self.scores_s
        return bool(self.changes) and (self.safer or after_s < (1.0 - LEAST_GAIN) * before_s)


def freed(spec: Spec, pinned: Mapping[str, Any]) -> Spec:
    """Return the spec with a layout that is open, but for the fields of ``parallel`` in ``pinned``, by their paths."""
    parallel = ParallelSpec()
    for path in (*_KEPT, *pinned):
        parallel = _with(parallel, path.split("."), reduce(getattr, path.split("."), spec.parallel))
    return spec.model_copy(update={"parallel": parallel})


def _with(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})


def advice(
    before: Plan | None,
    after: Plan,
    settings: Mapping[str, Setting] | None = None,
    carried: Mapping[str, str] | None = None,
) -> Advice:
    """Return what to change in the earlier plan; ``after`` is the best plan for the same engine.

    Where there is no earlier plan, as its layout does not fit, ``settings`` and ``carried`` of the user's file
    (:class:`partool.engines.settings.Sheet`) say what is there.
    """
    if after.engine not in WRITABLE:
        edits = tuple(_of_layout(before, after)) if before is not None else ()
    elif before is None and settings:
        edits = tuple(_of_file(terms_of(after), settings, carried or {}))
    else:
        terms = terms_of(after)
        old = terms_of(before) if before is not None else type(terms)(after)
        edits = tuple(change for change in changes(old, terms) if change.path.partition(".")[0] == "parallel")
    present = after if before is None else before
    return Advice(before, after, edits, (score_beside(present, present), score_beside(after, present)))


def _of_file(terms: EngineTerms, settings: Mapping[str, Setting], carried: Mapping[str, str]) -> Iterator[EngineChange]:
    """Yield what differs between a file's settings and a plan's; then settings of its layout that the plan has not."""
    for term in terms.terms:
        if not term.path.startswith("parallel"):
            continue
        setting = settings.get(term.name)
        if setting is None or not _same(setting.value, term.value):
            yield EngineChange(term.name, term.path, None if setting is None else setting.value, term.value)
    for name, path in carried.items():
        if path.startswith("parallel.") and name not in terms.by_name and not _off(settings[name].value):
            yield EngineChange(name, path, settings[name].value, None)


def _same(one: Any, other: Any) -> bool:
    try:
        return str(one).lower() == str(other).lower() or float(one) == float(other)
    except (TypeError, ValueError):
        return False


def _off(value: Any) -> bool:
    """Return True for a value with which a setting asks for nothing."""
    return str(value).lower() in ("0", "1", "false", "none", "no", "auto")


def _of_layout(before: Plan, after: Plan) -> list[EngineChange]:
    """Return differences in the words of a spec."""
    edits = []
    for line in differences(before, after):
        path, _, values = line.partition(": ")
        was, _, now = values.partition(" → ")
        if path.startswith("layout.") and not path.startswith("layout.derived."):
            name = path.removeprefix("layout.")
            edits.append(EngineChange(name, f"parallel.{name}", was, now))
    return edits


def theirs(change: EngineChange, settings: Mapping[str, Setting], carried: Mapping[str, str]) -> list[Setting]:
    """Return the settings of a user's file that a change is about: of its name, or else of its field in the spec."""
    if change.name in settings:
        return [settings[change.name]]
    return [settings[name] for name, path in carried.items() if path == change.path]
