"""Networks of rows: the rate of one rank between nodes, from notes such as ``8x CX-7 400 Gb/s per GPU``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gGtT])(?:i?(B)(?:/s|ps)|(?:b|bit)s?(?:/s|ps)|[bB]E\b|\b)")
"""A rate with its unit: ``1600 Gbps``, ``50 GB/s``, ``3.2 Tb/s``, ``400G``, ``100GbE``."""
_COUNT_BEFORE = re.compile(
    r"\b(\d{1,2})\s*[x×*]\s*(?:[a-z][\w-]*\s+)*$|\b(\d{1,2})\s+(?:nics?|adapters?|ports?|rails?)\b\D*$"
)
_COUNT_AFTER = re.compile(
    r"^(?:[a-z/ ]*[x×*]\s*(\d{1,2})\b|[a-z ]*,?\s*(\d{1,2})\s+(?:nics?|adapters?|ports?|rails?)\b)"
)
_GENERATIONS = {"xdr": 800.0, "ndr": 400.0, "hdr": 200.0, "edr": 100.0, "fdr": 56.0, "slingshot-11": 200.0}
"""Gb/s of one adapter by the name of its generation (InfiniBand Trade Association's roadmap; HPE Slingshot 11)."""
_SCOPES = (
    ("node", r"(?:per|/|a|each)\s*(?:node|host|server|machine)"),
    ("rank", r"(?:per|/|a|each)\s*(?:gpu|gcd|device|accelerator|rank|chip)"),
    ("adapter", r"(?:per|/|a|each)\s*(?:nic|adapter|hca|port|link|rail)"),
)


@dataclass(frozen=True)
class Network:
    """A rate between nodes as a note states it."""

    bytes_per_s: float
    """Rate of one rank in one direction."""
    assumed: bool = False
    """True if the note does not say whose rate it states: the rank's, an adapter's or the node's."""


def network_of(note: str, per_node: int, usual_bytes_per_s: float) -> Network | None:
    """Return the network that a note describes, or None if it states no rate.

    A rate belongs to the node, to a rank or to an adapter as the note says. A number before or after the rate counts
    the adapters of a node. A rate without either belongs to an adapter of which each rank has one, if ranks of such
    machines usually have one as fast; otherwise to the node.
    """
    stated = _stated(note)
    if stated is None:
        return None
    text = note.lower()
    rate, count = stated
    scope = next((name for name, pattern in _SCOPES if re.search(rf"{pattern}s?\b", text)), "")
    if scope == "node":
        return Network(rate * (count or 1) / per_node)
    if scope == "rank":
        # "8x 400 Gb/s per GPU" counts the adapters of a node with 8 devices; fewer adapters belong to one device.
        return Network(rate * (count if count and count < per_node else 1))
    if count:
        return Network(rate * count / per_node)
    if scope == "adapter":
        return Network(rate, assumed=True)
    return Network(rate if rate <= 1.01 * usual_bytes_per_s else rate / per_node, assumed=True)


def _stated(note: str) -> tuple[float, int] | None:
    """Return a note's rate in bytes per second, and the number of adapters beside it (0 if none is stated)."""
    match, text = _RATE.search(note), note.lower()
    if match:
        scale = 1e9 if match.group(2) in "gG" else 1e12
        return float(match.group(1)) * scale / (1 if match.group(3) else 8), _count(text, match.start(), match.end())
    for name, gigabits in _GENERATIONS.items():
        if at := re.search(rf"\b{name}\d*\b", text):
            return gigabits * 1e9 / 8, _count(text, at.start(), at.end())
    return None


def _count(text: str, start: int, stop: int) -> int:
    before, after = _COUNT_BEFORE.search(text[:start]), _COUNT_AFTER.match(text[stop:])
    match = before or after
    return int(next(group for group in match.groups() if group)) if match else 0
