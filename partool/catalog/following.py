"""Numbers of a preset or a file that follow from numbers which the spec changes, such as ``ffn_hidden``."""

from __future__ import annotations

from typing import Any

_MULTIPLE = 64
"""Widths that are no whole number in proportion are rounded up to a multiple of this number, as ``_derive`` does."""


def following(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``base`` that the spec does not give, changed in proportion to those that it gives.

    ``base`` are the fields of a preset or a file, ``given`` those of the spec. ``kv_heads`` keeps its ratio to
    ``heads`` where the ratio divides the new number of heads; ``ffn_hidden``, also that of experts, keeps its ratio to
    ``hidden``. ``head_dim`` becomes ``hidden`` over ``heads`` (None, which is derived later) if it is that in ``base``.
    """
    followed: dict[str, Any] = {}
    heads, hidden = given.get("heads"), given.get("hidden")
    if heads is not None and {"heads", "kv_heads"} <= base.keys() and "kv_heads" not in given:
        group, rest = divmod(base["heads"], base["kv_heads"])
        if not rest and heads % group == 0:
            followed["kv_heads"] = heads // group
    if hidden is not None and "hidden" in base:
        if "ffn_hidden" in base and "ffn_hidden" not in given:
            followed["ffn_hidden"] = _width(base["ffn_hidden"], hidden, base["hidden"])
        if "moe" in base and "moe" not in given:
            width = _width(base["moe"]["ffn_hidden"], hidden, base["hidden"])
            followed["moe"] = {**base["moe"], "ffn_hidden": width}
    if "head_dim" not in given and (heads is not None or hidden is not None) and _plain_head_dim(base):
        followed["head_dim"] = None
    if given.get("activation", "swiglu_clamped") != "swiglu_clamped":
        followed |= {name: None for name in ("swiglu_limit", "swiglu_alpha") if name not in given}
    return {name: value for name, value in followed.items() if value != base.get(name)}


def _width(old: int, hidden: int, old_hidden: int) -> int:
    """Return a width that has the same ratio to the new ``hidden`` as the old width has to the old one."""
    width, rest = divmod(old * hidden, old_hidden)
    return width if not rest else -(-old * hidden // (old_hidden * _MULTIPLE)) * _MULTIPLE


def _plain_head_dim(base: dict[str, Any]) -> bool:
    """Return True if the heads of ``base`` share its width evenly; False if a head has a width of its own."""
    if not {"head_dim", "hidden", "heads"} <= base.keys() or "mla" in base:
        return False
    return bool(base["head_dim"] * base["heads"] == base["hidden"])
