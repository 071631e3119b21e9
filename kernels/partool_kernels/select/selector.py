"""The selector measures candidates once per problem and device, and stores the fastest correct candidate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

from partool_kernels.select.store import Store, StoredAnswer
from partool_kernels.timing import Timer

REPEATS = 20
"""Number of timed calls of each candidate; candidates are called in turns, and the median time is used."""
GAIN = 0.03
"""Share by which a candidate has to be faster than an earlier candidate to replace it."""


class NothingWorksError(RuntimeError):
    """All candidates of a problem raised errors."""


@dataclass(frozen=True)
class Candidate:
    """An implementation that computes the result of a problem."""

    name: str
    run: Callable[[], Sequence[torch.Tensor]]
    """Compute the result for the problem's inputs; results of all candidates are equal except for rounding."""
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context that the calls need. It changes the whole process, so a candidate with a context is timed separately."""


@dataclass(frozen=True)
class Question:
    """A computation that is run often, and the candidates that can run it."""

    operation: str
    key: tuple[tuple[str, str | int], ...]
    """Names and values of everything that decides which candidate is fastest, such as sizes, types and variants."""
    names: tuple[str, ...]
    """Names of the candidates, in order of preference: the first is the default."""
    candidates: Callable[[], Sequence[Candidate]]
    """Make the inputs and candidates; called only for a measurement."""
    tolerance: float = 0.02
    """Largest allowed difference between two correct results, as a share of the largest element."""
    by_row: bool = False
    """True if each row's differences are compared with the row's largest element.

    The comparison by rows is unsuitable if a row is zero apart from rounding errors.
    """

    @property
    def text(self) -> str:
        """Return the key under which the answer is stored."""
        return " ".join((self.operation, *(f"{name}={value}" for name, value in self.key)))


@dataclass(frozen=True)
class Answer:
    """The candidate to use, and how it was chosen."""

    name: str
    source: Literal["measured", "kept", "default"]
    """``measured`` in this process, ``kept`` from an earlier process, or the ``default`` without a measurement."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Median seconds per call, for every candidate that works."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Reasons why the other candidates do not work, by the candidate's name."""


class Selector:
    """Measures the candidates of a problem on one device, and returns the fastest or a stored answer."""

    def __init__(self, timer: Timer, store: Store | None = None, *, measure: bool = True) -> None:
        """Store the timer and the store of answers; ``measure`` False always answers with the default.

        Reproducible training sets ``measure`` to False, as implementations differ in the last bits.
        """
        self._timer, self._store, self._measures = timer, store, measure
        self._answers: dict[tuple[str, tuple[str, ...]], Answer] = {}

    def choose(self, problem: Question) -> Answer:
        """Return the answer to a problem; raises :class:`NothingWorksError`."""
        if not self._measures or cannot_measure():
            return Answer(problem.names[0], "default")
        asked = problem.text, problem.names
        if asked not in self._answers:
            self._answers[asked] = self._kept(problem) or self._measured(problem)
        return self._answers[asked]

    def _kept(self, problem: Question) -> Answer | None:
        answer = self._store.read().get(problem.text) if self._store is not None else None
        # A stored answer is void if implementations were added or removed since.
        if answer is None or answer.get("names") != list(problem.names) or answer["name"] not in problem.names:
            return None
        return Answer(answer["name"], "kept", dict(answer.get("seconds", {})), dict(answer.get("excluded", {})))

    def _measured(self, problem: Question) -> Answer:
        # A failed measurement does not stop training: the training step may have used up the memory that it needs.
        try:
            right, excluded = _right(problem)
            seconds = self._seconds(right) if len(right) > 1 else {}
        except RuntimeError as error:
            warnings.warn(f"{problem.text} is not measured: {_words(error)}", RuntimeWarning, stacklevel=4)
            return Answer(problem.names[0], "default")
        if not right:
            problems = "; ".join(f"{name}: {reason}" for name, reason in excluded.items())
            raise NothingWorksError(f"no implementation of {problem.text} works: {problems}")
        best = right[0].name
        for name, time_s in seconds.items():
            if time_s < seconds[best] * (1 - GAIN):
                best = name
        answer = Answer(best, "measured", seconds, excluded)
        if self._store is not None:
            kept = StoredAnswer(names=list(problem.names), name=answer.name, seconds=seconds, excluded=excluded)
            self._store.put(problem.text, kept)
        return answer

    def _seconds(self, right: Sequence[Candidate]) -> dict[str, float]:
        """Return the median seconds of each candidate by name, in the order of ``right``."""
        plain = [one for one in right if one.within is nullcontext]
        times = self._timer.medians_s([one.run for one in plain], REPEATS) if plain else []
        times_s = {one.name: time_s for one, time_s in zip(plain, times, strict=True)}
        for one in right:
            if one.within is not nullcontext:
                with one.within():
                    (times_s[one.name],) = self._timer.medians_s([one.run], REPEATS)
        return {one.name: times_s[one.name] for one in right}


def _right(problem: Question) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that agree with the first candidate that runs, and why the others are excluded.

    Raises RuntimeError where candidates cannot be compared: memory does not suffice, or results are not finite or are
    all zero.
    """
    right: list[Candidate] = []
    excluded: dict[str, str] = {}
    truth: list[torch.Tensor] = []
    for candidate in problem.candidates():
        try:
            # Libraries warn about missing support before they raise; the warning is dropped, as the error says why.
            with candidate.within(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = [x.detach().float().cpu() for x in candidate.run()]
        except torch.OutOfMemoryError:  # another run may have enough memory
            raise
        except Exception as error:  # libraries and drivers raise errors of many types
            excluded[candidate.name] = _words(error)
            continue
        if not truth:
            truth = results
            if not all(x.isfinite().all() for x in truth) or not any(x.any() for x in truth):
                raise RuntimeError(f"results of {candidate.name} are zero, or not finite: others cannot be compared")
        elif problem_with := _difference(results, truth, problem):
            excluded[candidate.name] = problem_with
            continue
        right.append(candidate)
    return right, excluded


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _difference(results: Sequence[torch.Tensor], truth: Sequence[torch.Tensor], problem: Question) -> str:
    """Return a text that says how results differ by more than rounding, or an empty text if they do not."""
    if [x.shape for x in results] != [x.shape for x in truth]:
        return f"results {[list(x.shape) for x in results]} are not {[list(x.shape) for x in truth]}"
    for one, other in zip(results, truth, strict=True):
        if not other.numel():
            continue
        rows = (x.abs() if problem.by_row else x.abs().flatten()[None] for x in (one - other, other))
        apart, largest = (x.amax(-1) for x in rows)
        if not (apart <= problem.tolerance * largest).all():
            return f"differs by {float((apart / largest).max()):.2g} of the largest element"
    return ""


def cannot_measure() -> bool:
    """Return whether calls are now traced or recorded, so that no time can be measured."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
