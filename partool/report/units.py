"""Numbers formatted for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor

from partool.cost.evidence import fit_limit
from partool.plan.types import Prediction

_GIB = 2**30


def gib(size_bytes: float) -> str:
    """Return bytes as GiB with three figures: ``0.013``, ``4.71``, ``64.2``."""
    value = size_bytes / _GIB
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def size(value_bytes: float) -> str:
    """Return bytes with their unit: ``812 B``, ``1.5 MiB``, ``64.2 GiB``, ``2.31 TiB``."""
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value_bytes >= limit:
            return (
                f"{value_bytes / limit:.3g} {unit}"
                if value_bytes < 1000 * limit
                else f"{value_bytes / limit:.0f} {unit}"
            )
    return f"{value_bytes:.0f} B"


def seconds(value_s: float) -> str:
    """Return a short time with its unit: ``43 us``, ``1.2 ms``, ``3.4 s``."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value_s < limit:
            return f"{value_s * factor:.3g} {unit}"
    return f"{value_s:.3g} s" if value_s < 1000 else f"{value_s:.0f} s"


def amount(value: float) -> str:
    """Return a count with three figures: ``952``, ``1.77 M``, ``8.03 B``."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def counted(count: int, name: str) -> str:
    """Return a number of things: ``1 rank``, ``4,096 tokens``, ``2 micro-batches``."""
    plural = "es" if name.endswith("ch") else "s"
    return f"{count:,} {name}" + plural * (count != 1)


def probability(value: float, *, counted: bool = False) -> str:
    """Return a probability of fitting as text: no more than the runs support that were predicted to fit.

    With ``counted``, the text of a probability that these runs limit names them.
    """
    limit, fitted, green = fit_limit()
    if value < limit:
        return "< 0.1 %" if value < 0.001 else f"{100 * value:.1f} %"
    return f"{floor(100 * limit)} %" + (f" ({fitted} of {green} such runs fitted)" if counted else "")


def bars(prediction: Prediction) -> str:
    """Return the errors of a step time as text: ``± 5%``, or ``-12/+25%`` where they differ."""
    above, below = f"{prediction.relative_error:.0%}", prediction.relative_error_below
    return f"± {above}" if below is None or f"{below:.0%}" == above else f"-{100 * below:.0f}/+{above}"


def in_order(terms: Mapping[str, float], order: Iterable[str]) -> list[tuple[str, float]]:
    """Return (name, value) of the terms above zero, in the order of ``order``; plans read from files are unordered."""
    ordered = {name: terms[name] for name in order if terms.get(name, 0.0) > 0.0}
    return [*ordered.items(), *((name, value) for name, value in terms.items() if name not in ordered and value > 0.0)]


def figure(value: float | None, form: str) -> str:
    """Return a number in a format, or a dash for None, which logs have in place of a number that is not finite."""
    return "–" if value is None else format(value, form)
