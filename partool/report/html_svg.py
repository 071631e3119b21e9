"""Write SVG pictures as compact, escaped text; each picture has a title and a description."""

from __future__ import annotations

import math
from html import escape
from typing import Any


def number(value: float) -> str:
    """Return a coordinate as text with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def tag(name: str, *children: str, **attributes: Any) -> str:
    """Return an element as markup. ``children`` must be markup already (see :func:`text`); attributes are escaped here.

    ``class_`` stands for ``class``, an underscore for a hyphen; numbers are shortened.
    """
    parts = []
    for key, value in attributes.items():
        shown = number(value) if isinstance(value, float) else str(value)
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(shown, quote=True)}"')
    return f"<{name}{''.join(parts)}>{''.join(children)}</{name}>"


def text(content: object) -> str:
    """Return ``content`` as text that is escaped for markup."""
    return escape(str(content), quote=True)


class Picture:
    """Collects the parts of one SVG."""

    def __init__(self, width: float, height: float, title: str, description: str, /, **attributes: Any) -> None:
        self._size = (width, height)
        self._said = (title, description)
        self._attributes = attributes
        self._parts: list[str] = []

    def add(self, name: str, *children: str, **attributes: Any) -> None:
        """Add an element; the arguments are those of :func:`tag`."""
        self._parts.append(tag(name, *children, **attributes))

    def markup(self, identifier: str) -> str:
        """Return the SVG; ``identifier`` must be unique in the page."""
        width, height = self._size
        title, description = self._said
        return tag(
            "svg",
            tag("title", text(title), id=f"{identifier}-title"),
            tag("desc", text(description), id=f"{identifier}-desc"),
            *self._parts,
            id=identifier,
            viewBox=f"0 0 {number(width)} {number(height)}",
            role="img",
            aria_labelledby=f"{identifier}-title {identifier}-desc",
            **self._attributes,
        )


def bar(
    identifier: str, title: str, parts: list[tuple[str, float, str]], full_width: float, lines: list[tuple[float, str]]
) -> str:
    """Return the SVG of a stacked bar of ``parts`` (class, value, words); the full width stands for ``full_width``.

    ``lines`` are (value, class) of vertical lines that mark values.
    """
    described = ", ".join(words for _, _, words in parts) or "nothing"
    picture = Picture(1000, 24, title, described, preserveAspectRatio="none", class_="bar")
    at = 0.0
    for class_, value, words in parts:
        width = 1000.0 * value / full_width
        picture.add("rect", tag("title", text(words)), class_=class_, x=at, y=0, width=width, height=24)
        at += width
    for value, class_ in lines:
        x = min(1000.0 * value / full_width, 998.0)
        picture.add("line", class_=class_, x1=x, x2=x, y1=0, y2=24)
    return picture.markup(identifier)


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return at most about ``most`` round numbers between ``low`` and ``high``."""
    if high <= low:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two positive numbers: 1, 2 and 5 times powers of ten.

    If ``high / low`` is below 10, the factors 3, 4 and 7 are added; from 1,000 on, only powers of ten are returned.
    """
    factors = (1, 2, 3, 4, 5, 7) if high / low < 10 else (1, 2, 5) if high / low < 1000 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in candidates if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def tick_label(value: float) -> str:
    """Return an axis label: ``0.25``, ``40``, ``1,500``."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
