"""Routers whose load is followed, in one process."""

from __future__ import annotations

from typing import Any

import torch

from partool.spec.experts import Moe
from partool.spec.model import ModelConfig
from partool_runtime.model.routing import Router
from partool_runtime.parallel.expert.load import LayerLoad, Scopes
from partool_runtime.parallel.expert.tokens import TokenShares

BASE: dict[str, Any] = {
    "layers": 3, "hidden": 10, "ffn_hidden": 14, "heads": 2, "kv_heads": 2, "head_dim": 6, "vocab": 31,
}  # fmt: skip


def observed(moe: Moe, tokens: int) -> tuple[Router, LayerLoad]:
    """Return a router of one process whose load is followed; losses are means over the tokens."""
    router = Router(ModelConfig(**BASE, moe=moe)).double()
    router.weight.data.normal_()
    scopes = Scopes(None, None, 1, TokenShares((tuple(range(tokens)),), 0))
    load = LayerLoad(moe, scopes, torch.device("cpu"), torch.tensor(1.0 / tokens, dtype=torch.float64))
    router.observer = load
    return router, load
