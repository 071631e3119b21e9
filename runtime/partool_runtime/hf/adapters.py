"""Adapters of models that transformers builds: their linear modules become partool's, in place."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from partool.layout.tensor.adapters import adapted
from partool.spec.adapter import LowRank
from partool_runtime.hf.structure import structure_of
from partool_runtime.model.adapter import adapt


def add_to_transformers(causal: nn.Module, adapter: LowRank | None) -> None:
    """Give the linear modules of a model's layers that are targets their A and B, with parameters on the meta device.

    Experts' matrices that transformers stacks in one tensor are no modules, so they get none.
    """
    if adapter is None:
        return
    with torch.device("meta"):
        for name in adapted(structure_of(causal), adapter):
            adapt(cast(nn.Linear, causal.get_submodule(name)), adapter)
