"""Experts of rows' models, from names and notes such as ``8x7B``, ``MoE 64e top-8`` or ``128 experts``."""

from __future__ import annotations

import re
from typing import Any

from partool.replay.cells import Cells

_SPEAKS = r"\bmoe\b|moe[-_ ]|[-_ ]moe|mixture of experts|\bexperts?\b|\d+x\d+(?:\.\d+)?[bm]\b|\ba\d+(?:\.\d+)?b\b"
"""What a model's name says only if it has experts; ``A3B`` states the parameters that one token uses."""
_ROUTED = (
    r"\b(\d+)[ -]?(?:routed |local |total )?experts?\b", r"\b(\d+)e\b", r"\be(\d+)\b",
    r"\bexperts?\s*[:=]\s*(\d+)", r"\bnum_experts\s*[:=]?\s*(\d+)",
)  # fmt: skip
_TIMES = r"\b(\d+)x\d+(?:\.\d+)?[bm]\b"
_CHOSEN = (
    r"\btop[-_ ]?k?\s*[:=]?\s*(\d+)", r"\b(\d+)[ -](?:active|activated)(?: routed)? experts?\b",
    r"\b(\d+) (?:of|out of) \d+ experts?\b", r"(?<!of )\b(\d+) experts? per token\b", r"\bk\s*=\s*(\d+)",
)  # fmt: skip
_SHARED = r"\b(\d+)[ -]?shared[ -]experts?\b"
_EVERY = r"every (\d+)(?:nd|rd|th)?[ -]layers?\b|\bmoe_frequency\s*[:=]?\s*(\d+)"
_FEW = 16
"""Experts up to which a token is sent to two of them where a row does not say (Mixtral, arXiv 2401.04088); with more it
is sent to eight (Qwen3, arXiv 2505.09388; DeepSeek-V3, arXiv 2412.19437)."""


def has_experts(cells: Cells) -> bool:
    """Return True if a row's model has experts, whether or not the row says how many."""
    return _spoken(cells) is not None


def experts_of(cells: Cells) -> dict[str, Any] | None:
    """Return the numbers of experts as fields of :class:`partool.spec.experts.Moe`; None if a row states none.

    The width of an expert is not among them. Notes count only where the model's name or a degree of expert parallelism
    says that there are experts, since notes compare with other models.
    """
    text = _spoken(cells)
    if text is None:
        return None
    plain = re.sub(rf"{_SHARED}|\b(?:no|0) (?:shared )?experts?\b|\bshared[ -]experts?\b", " ", text)
    # What a token chooses is no number of experts: "2 of 8 experts", "8 active experts", "2 experts per token".
    routed_text = plain
    for pattern in (_CHOSEN[1], _CHOSEN[3], r"\b\d+ (?:of|out of) (?=\d+ experts?)"):
        routed_text = re.sub(pattern, " ", routed_text)
    routed = _first((*_ROUTED, _TIMES), routed_text)
    if routed is None or routed < 2:
        return None
    chosen = _first(_CHOSEN, plain) or (2 if routed <= _FEW else 8)
    shared = re.search(_SHARED, text)
    every = re.search(_EVERY, text)
    other = re.search(r"every (?:other|second) layer", text) is not None
    return {
        "experts": routed,
        "top_k": min(chosen, routed),
        "shared_experts": int(shared.group(1)) if shared else int(re.search(r"\bshared[ -]expert", text) is not None),
        "every": int(every.group(1) or every.group(2)) if every else 2 if other else 1,
    }


def _spoken(cells: Cells) -> str | None:
    """Return the text that speaks of a row's experts, in lower case; None if its model has none."""
    model = cells.lower("model").replace("_", " ").replace("×", "x")
    if re.search(_SPEAKS, model) or cells.count("ep", 1) > 1:
        return f"{model}; {cells.lower('notes').replace('×', 'x')}"
    return None


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    return next((int(match.group(1)) for pattern in patterns if (match := re.search(pattern, text))), None)
