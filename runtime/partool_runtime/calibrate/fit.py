"""Pure functions that compute figures from timings: medians, spreads, and lines through the times of collectives."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
Json = dict[str, Any]
_FEWEST_SHAPES = 6
_RANGE = 2.0
"""Least ratio of the most to the fewest elements per FLOP among shapes whose times tell apart elements and FLOPs."""
_FASTER = 2.0
"""Most times that the rate without elements may be the best measured rate."""


def summary(samples: Sequence[float]) -> tuple[int, float, float]:
    """Return the number of values, their median, and their median absolute deviation from the median."""
    median = statistics.median(samples)
    return len(samples), median, statistics.median(abs(sample - median) for sample in samples)


def alpha_beta(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return ``alpha`` and ``beta`` that fit ``seconds = alpha + beta * size`` with the least squared relative errors.

    ``points`` holds pairs (size, seconds). An ``alpha`` below 0 becomes 0, and ``beta`` is fitted again. Raises
    ValueError for fewer than two sizes, or for times that do not grow with the size.
    """
    timed = [(size, seconds) for size, seconds in points if seconds > 0]
    if len({size for size, _ in timed}) < 2:
        raise ValueError("a line needs two sizes")
    weights = [seconds**-2 for _, seconds in timed]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, timed, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, timed, strict=True)) / total
    over = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, timed, strict=True))
    beta = over / sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, timed, strict=True))
    alpha = mean_y - beta * mean_x
    if alpha < 0:
        alpha = 0.0
        squares = sum(w * x * x for w, (x, _) in zip(weights, timed, strict=True))
        beta = sum(w * x * y for w, (x, y) in zip(weights, timed, strict=True)) / squares
    if beta <= 0:
        raise ValueError("times do not grow with the size")
    return alpha, beta


def product_line(points: Iterable[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    """Return ``rate``, ``element_s`` and the error that fit ``seconds = flops / rate + elements * element_s``.

    ``points`` holds triples (flops, elements, seconds); the error is the median of the relative ones. The line is that
    of :func:`alpha_beta` through the seconds per FLOP. Points far from the line of median slope are left out, since
    another program may have slowed them down. The result is None if the shapes are too few or too similar to tell the
    two parameters apart, or if no two positive parameters fit.
    """
    per_flop = [(elements / flops, seconds / flops) for flops, elements, seconds in points]
    if len(per_flop) < _FEWEST_SHAPES or max(x for x, _ in per_flop) < _RANGE * min(x for x, _ in per_flop):
        return None
    slope = statistics.median((w - y) / (v - x) for (x, y), (v, w) in combinations(per_flop, 2) if v != x)
    start = statistics.median(y - slope * x for x, y in per_flop)
    off = [abs(start + slope * x - y) / y for x, y in per_flop]
    near = [
        point for point, error in zip(per_flop, off, strict=True) if error <= 3.0 * max(statistics.median(off), 0.01)
    ]
    try:
        alpha, beta = alpha_beta(near)
    except ValueError:
        return None
    # A rate far above every measured one is a guess beyond the shapes.
    if alpha * _FASTER < min(y for _, y in per_flop):
        return None
    return 1.0 / alpha, beta, statistics.median(abs(alpha + beta * x - y) / y for x, y in per_flop)


def figures(measurements: Sequence[Mapping[str, Any]], backend: str, ranks: int) -> Json:
    """Return the figures that plans use, computed from ``measurements``; a figure is left out if it was not measured.

    Rates are measured on one rank while all ranks work; the rate of the storage is that of all ranks together. On
    accelerators the rate of matrix products and of attention is the rate of the best shape, because the cost model
    predicts how much slower smaller shapes are. On the CPU the rate is the median over shapes; where a line fits the
    products' times, plans use that line.
    """
    best = backend != "cpu"
    fitted: Json = {}
    for name, kind in (("achievable_flops", "gemm"), ("attention_flops", "attention")):
        of_kind = _of(measurements, kind)
        precisions = sorted({m["precision"] for m in of_kind})
        if precisions:
            fitted[name] = {p: _rate([m for m in of_kind if m["precision"] == p], best) for p in precisions}
    if not best and (lines := _products(_of(measurements, "gemm"))):
        fitted["products"] = lines
    if not best and (rates_by_length := _by_length(_of(measurements, "attention"))):
        fitted["attention_by_length"] = rates_by_length
    rates = (
        ("stream_bytes_per_s", "memory"),
        ("fresh_bytes_per_s", "fresh"),
        ("adam_parameters_per_s", "adam"),
        ("storage_bytes_per_s", "storage"),
    )
    for name, kind in rates:
        if of_kind := _of(measurements, kind):
            fitted[name] = _rate(of_kind, best=False)
    if of_kind := _of(measurements, "operator"):
        times = [m["seconds"] / m["work"] for m in of_kind]
        n, median, mad = summary(times)
        spread = mad if n > 1 else of_kind[0]["mad_s"] / of_kind[0]["work"]
        fitted["operator_s"] = _figure(median, "s", sum(m["n"] for m in of_kind), spread)
    if of_kind := _of(measurements, "host_link"):
        # The slower direction counts: gradients and parameters move in opposite directions; the plan has one figure.
        fitted["host_link_bytes_per_s"] = _rate(of_kind, best=False, worst=True)
    lines = {name: line for name in COLLECTIVES if (line := _line(measurements, name, ranks)) is not None}
    if lines:
        fitted["collectives"] = lines
    return fitted


def _of(measurements: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [m for m in measurements if m["kind"] == kind and m["seconds"] > 0]


def _rate(of_kind: Sequence[Mapping[str, Any]], best: bool, worst: bool = False) -> Json:
    """Return the shapes' median rate and its spread over shapes, or one shape's rate and its spread over repeats.

    ``best`` selects the shape with the highest rate, ``worst`` the shape with the lowest rate.
    """
    rates = [m["work"] / m["seconds"] for m in of_kind]
    n = sum(m["n"] for m in of_kind)
    unit = of_kind[0]["work_unit"] + "/s"
    if best or worst or len(rates) == 1:
        index = rates.index(min(rates) if worst else max(rates))
        return _figure(rates[index], unit, n, rates[index] * of_kind[index]["mad_s"] / of_kind[index]["seconds"])
    _, median, mad = summary(rates)
    return _figure(median, unit, n, mad)


def _products(gemms: Sequence[Mapping[str, Any]]) -> Json:
    """Return the lines through the times of matrix products, by precision; a precision without a line is left out."""
    products: Json = {}
    for precision in sorted({m["precision"] for m in gemms}):
        shapes = [m for m in gemms if m["precision"] == precision and m.get("elements")]
        line = product_line((m["work"], m["elements"], m["seconds"]) for m in shapes)
        if line is not None:
            rate, element_s, error = line
            n = sum(m["n"] for m in shapes)
            products[precision] = {
                "flops_per_s": _figure(rate, "flop/s", n, rate * error),
                "element_s": _figure(element_s, "s/element", n, element_s * error),
            }
    return products


def _by_length(attention: Sequence[Mapping[str, Any]]) -> Json:
    """Return the rates of attention by precision and sequence length, for precisions with several lengths."""
    rates: Json = {}
    for precision in sorted({m["precision"] for m in attention}):
        shapes = [m for m in attention if m["precision"] == precision and m.get("length")]
        lengths = sorted({m["length"] for m in shapes})
        if len(lengths) > 1:
            rates[precision] = {n: _rate([m for m in shapes if m["length"] == n], best=False) for n in lengths}
    return rates


def _line(measurements: Sequence[Mapping[str, Any]], name: str, ranks: int) -> Json | None:
    """Return a collective's latency and rate; the rate counts (ranks - 1) / ranks of the whole tensor's bytes."""
    of_kind = [m for m in _of(measurements, "collective") if m["name"].startswith(name + " ")]
    try:
        alpha, beta = alpha_beta((m["work"] * (ranks - 1) / ranks, m["seconds"]) for m in of_kind)
    except (ValueError, ZeroDivisionError):
        return None
    n = sum(m["n"] for m in of_kind)
    off = [abs(m["seconds"] - alpha - beta * m["work"] * (ranks - 1) / ranks) / m["seconds"] for m in of_kind]
    relative = statistics.median(off)
    return {
        "latency_s": _figure(alpha, "s", n, alpha * relative),
        "bytes_per_s": _figure(1 / beta, "byte/s", n, relative / beta),
    }


def _figure(value: float, unit: str, n: int, mad: float) -> Json:
    return {"value": value, "unit": unit, "n": n, "mad": mad}
