"""Rotation of queries and keys by one kernel each; the kernel also normalises queries and keys if the model does."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from partool_kernels.rope.op import rope
from partool_runtime.fused.types import Fusing
from partool_runtime.model.attention import SelfAttention, Turn, turned
from partool_runtime.model.norm import RMSNorm
from partool_runtime.model.rope import Tables


def fuse_rope(model: nn.Module, how: Fusing) -> None:
    """Make every attention module with rotary embeddings use the kernel, in place.

    The kernel includes no norm whose parameters are gathered separately, since the gather happens when the norm is
    called, and no norm that is already replaced: the module calls these norms. Attention of transformers' models is not
    changed.
    """
    if how.model.position != "rope":
        return
    # One function for all layers: torch.compile would recompile layers for each new function.
    both, alone = _in_one(how.mode), _rotation(how.mode)
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention):
            norms = [f"{name}.q_norm", f"{name}.k_norm"] if module.qk_norm else []
            apart = any(fnmatchcase(norm, pattern) for norm in norms for pattern in how.leaves)
            plain = all(_is_plain(model.get_submodule(norm)) for norm in norms)
            module.turn = both if plain and not apart else alone


def _is_plain(norm: nn.Module) -> bool:
    return type(norm) is RMSNorm and norm.by is None


def _rotation(mode: str) -> Turn:
    def turn(heads_BSND: torch.Tensor, norm: nn.Module | None, tables: Tables | None) -> torch.Tensor:
        if tables is None:
            return turned(heads_BSND, norm, tables)
        return rope(heads_BSND if norm is None else norm(heads_BSND), tables, mode=mode)

    return turn


def _in_one(mode: str) -> Turn:
    def turn(heads_BSND: torch.Tensor, norm: nn.Module | None, tables: Tables | None) -> torch.Tensor:
        if tables is None:
            return turned(heads_BSND, norm, tables)
        if norm is None:
            return rope(heads_BSND, tables, mode=mode)
        # The norm's current parameter, which may be gathered or received.
        assert isinstance(norm, RMSNorm)
        return rope(heads_BSND, tables, norm.weight, norm.eps, mode=mode)

    return turn
