"""Splits measured attention into the seconds of a kernel, on a grid, and the cost of writing the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from partool.catalog.silicon.grid import interpolate

Floats = NDArray[np.float64]

LENGTHS = np.array([128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 10240, 12288, 16384], float)
HEADS = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384], float
)
"""Numbers of query heads of all sequences together; half octaves where the multiprocessors are not all busy."""
L2_BYTES = {"a100-80": 40e6, "h100-sxm": 50e6, "h200": 50e6, "l40s": 96e6, "rtx-pro-6000": 128e6}
"""Bytes of the last cache (vendors' data sheets); 126e6 on Blackwell servers. Writes within half of it are faster."""
KEY_HEADS = 2.0 ** np.arange(7)
"""Numbers of key heads between which the seconds of writing one token's keys and values follow a line: they are not
proportional to the bytes, as the engine's kernel divides a token's elements among threads."""
_FAR_OFF = np.log(2.0)
"""Rows that are further from the fit than this factor are isolated outliers."""
_MOST_ROUNDS = 3000
"""Rounds of coordinate descent, which ends before in all fits of the shipped tables."""


@dataclass
class Rows:
    """Measurements of one kernel and head width, as columns."""

    device: str
    kernel: str
    framework: str
    width: str
    """Elements per head; of latent attention those of keys and of values, joined by ``+``."""
    batch: Floats
    length: Floats
    heads: Floats
    key_heads: Floats
    window: Floats
    """Keys that a query sees at most; 0 means all."""
    seconds: Floats
    dropped: dict[str, int] = field(default_factory=dict)

    def taken(self, which: NDArray[np.bool_]) -> Rows:
        """Return the rows for which ``which`` is true."""
        columns = {name: getattr(self, name)[which] for name in COLUMNS}
        return Rows(self.device, self.kernel, self.framework, self.width, **columns, dropped=dict(self.dropped))

    @property
    def work(self) -> Floats:
        """Query heads of all sequences."""
        return self.batch * self.heads

    @property
    def pairs(self) -> Floats:
        """Query-key pairs of all heads."""
        seen = np.where(self.window > 0, np.minimum(self.window, self.length), self.length)
        return self.work * seen * (self.length - seen / 2.0)

    @property
    def flops(self) -> Floats:
        """FLOPs of both products over the pairs."""
        widths = [int(each) for each in self.width.split("+")]
        return 2.0 * self.pairs * (widths[0] + widths[-1])


COLUMNS = ("batch", "length", "heads", "key_heads", "window", "seconds")


@dataclass
class Split:
    """Kernel seconds by window on :data:`LENGTHS` × :data:`HEADS`, as logarithms, and the cost of the cache."""

    log_s: dict[int, Floats]
    cache: list[float]
    """Seconds per token with each number of :data:`KEY_HEADS`, and per byte beyond half of the last cache."""

    def predicted(self, rows: Rows) -> Floats:
        """Return the seconds of measurements: kernel and writing of the cache.

        Beyond the longest length of the tables full attention grows with its square, as prices do.
        """
        seconds = cache_features(rows) @ np.array(self.cache)
        for window, log_s in self.log_s.items():
            which = rows.window == window
            at = [np.log(rows.length[which]), np.log(rows.work[which])]
            beyond = np.maximum(rows.length[which] / LENGTHS[-1], 1.0) ** 2
            seconds[which] += beyond * np.exp(interpolate([np.log(LENGTHS), np.log(HEADS)], log_s, at))
        return seconds


def cache_features(rows: Rows) -> Floats:
    """Return tokens, divided between the nearest of :data:`KEY_HEADS`, and bytes beyond half of the last cache."""
    width = int(rows.width.split("+")[0])
    moved = 4.0 * rows.batch * rows.key_heads * rows.length * width
    beyond = np.maximum(moved - L2_BYTES.get(rows.device, 126e6) / 2.0, 0.0)
    tokens = rows.batch * rows.length * (rows.key_heads > 0)
    return np.concatenate([_hats(KEY_HEADS, rows.key_heads) * tokens[:, None], beyond[:, None]], axis=1)


def split(rows: Rows) -> Split:
    """Return kernel seconds and the cache's cost, fitted together; outliers in ``rows`` are counted and left out."""
    kept, cache, kernel_s = rows, [0.0, 0.0, 0.0], rows.seconds
    for _ in range(2):
        cache, kernel_s, total_s = _without_cache(kept)
        near = np.abs(np.log(kept.seconds / total_s)) < _FAR_OFF
        if near.all():
            break
        kept, kernel_s = kept.taken(near), kernel_s[near]
    rows.dropped["outliers"] = len(rows.seconds) - len(kept.seconds)
    full: Floats | None = None
    tables: dict[int, Floats] = {}
    for window in sorted(set(kept.window.astype(int).tolist())):
        which = kept.window == window
        log_s = _on_grid(kept.length[which], kept.work[which], np.log(kernel_s[which]))
        full = log_s if window == 0 else full
        tables[window] = log_s if window == 0 or full is None else _within(log_s, full, window)
    return Split(tables, cache)


def _within(log_s: Floats, full: Floats, window: int) -> Floats:
    """Return seconds with a window that are at most those of full attention, and these where the window is no less."""
    log_s = np.where((window >= LENGTHS)[:, None], full, log_s)
    return np.minimum(np.maximum.accumulate(log_s, axis=0), full)


def _without_cache(rows: Rows) -> tuple[list[float], Floats, Floats]:
    """Return the cache's cost, kernel seconds of each row's point, and the sum of both for each row.

    The cost is the one that leaves the least relative errors when the kernel's seconds are free at each combination of
    window, length and heads; errors beyond 1 % count linearly (iteratively reweighted least squares).
    """
    points = np.stack([rows.window, rows.length, rows.work], axis=1)
    _, place = np.unique(points, axis=0, return_inverse=True)
    place = place.reshape(-1)
    features, seconds = cache_features(rows), rows.seconds
    weights = np.ones(len(seconds))
    cost = np.zeros(features.shape[1])
    kernel, total = seconds, seconds
    for _ in range(8):
        scaled = weights / seconds**2
        total_weight = np.bincount(place, scaled)

        def mean(values: Floats, scaled: Floats = scaled, total_weight: Floats = total_weight) -> Floats:
            sums: Floats = (np.bincount(place, scaled * values) / total_weight)[place]
            return sums

        root = np.sqrt(scaled)
        parts = np.stack([(column - mean(column)) * root for column in features.T], axis=1)
        cost = _least_squares(parts, (seconds - mean(seconds)) * root)
        kernel = np.maximum(mean(seconds - features @ cost), 0.2 * mean(seconds))
        total = kernel + features @ cost
        weights = 1.0 / np.maximum(np.abs(total / seconds - 1.0), 0.01)
    return _unmeasured_filled(cost, features).tolist(), kernel, total


def _unmeasured_filled(cost: Floats, features: Floats) -> Floats:
    """Return the cache's cost with that of key heads that no row has, in proportion to the next smaller number."""
    filled = cost.copy()
    for place in range(1, len(KEY_HEADS)):
        if not features[:, place].any():
            filled[place] = filled[place - 1] * KEY_HEADS[place] / KEY_HEADS[place - 1]
    return filled


def _least_squares(parts: Floats, target: Floats) -> Floats:
    """Return the non-negative coefficients with the least squares (cyclic coordinate descent)."""
    scale = np.sqrt(np.sum(parts * parts, axis=0))
    scale[scale == 0.0] = 1.0
    products, right = (parts / scale).T @ (parts / scale), (parts / scale).T @ target
    cost = np.zeros(len(right))
    for _ in range(_MOST_ROUNDS):
        before = cost.copy()
        for place in np.flatnonzero(np.diag(products)):
            cost[place] = max(cost[place] + right[place] - products[place] @ cost, 0.0)
        if np.max(np.abs(cost - before)) <= 1e-9 * np.max(cost):
            break
    return cost / scale


def _on_grid(length: Floats, work: Floats, log_s: Floats) -> Floats:
    """Return logarithms of seconds on the grid, rising with length and with heads.

    For each measured length the values at :data:`HEADS` are fitted so that the lines between them pass the
    measurements; a weak smoothness fills nodes without any. Beyond the largest measured number of heads, seconds are
    proportional to it. Lengths that were not measured lie on lines between the others.
    """
    axis = np.log(HEADS)
    measured = [value for value in LENGTHS if (length == value).any()]
    lines = []
    for value in measured:
        here = length == value
        at, target = np.log(work[here]), log_s[here] - np.log(work[here])
        hats = _hats(axis, at)
        smooth = 0.05 * np.diff(np.eye(len(axis)), 2, axis=0)
        flat = 0.02 * np.diff(np.eye(len(axis)), 1, axis=0)
        flat[axis[1:] <= at.max()] = 0.0
        flat = flat * 50.0
        rows = np.concatenate([hats, smooth, flat])
        right = np.concatenate([target, np.zeros(len(smooth) + len(flat))])
        lines.append(np.linalg.lstsq(rows, right, rcond=None)[0] + axis)
    filled = np.stack([np.interp(np.log(LENGTHS), np.log(measured), line) for line in np.stack(lines, axis=1)], axis=1)
    for _ in range(6):
        filled = np.stack([rising(line) for line in filled])
        filled = np.stack([rising(line) for line in filled.T], axis=1)
    return np.maximum.accumulate(np.maximum.accumulate(filled, axis=0), axis=1)


def _hats(axis: Floats, at: Floats) -> Floats:
    """Return the weight of each node of ``axis`` in linear interpolation at ``at``."""
    return np.stack([np.interp(at, axis, unit) for unit in np.eye(len(axis))], axis=1)


def rising(values: Floats) -> Floats:
    """Return the closest sequence in least squares that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, some), (second, others) = pools[-2:]
            pools[-2:] = [((first * some + second * others) / (some + others), some + others)]
    return np.concatenate([np.full(count, value) for value, count in pools])
