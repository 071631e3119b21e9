"""Optimizers that specs can name, one record each; docs/optimizers.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerRecord:
    """Facts about an optimizer."""

    source: str
    moments: int
    """Numbers that it keeps per trained parameter beside the weight."""
    reads: tuple[str, ...]
    """Those of the settings that are not every optimizer's which it reads."""


OPTIMIZERS: dict[str, OptimizerRecord] = {
    "adamw": OptimizerRecord("Loshchilov and Hutter, arXiv 1711.05101", 2, ("betas", "eps")),
    "lion": OptimizerRecord("Chen et al., arXiv 2302.06675", 1, ("betas",)),
    "adagrad": OptimizerRecord("Duchi et al., JMLR 12 (2011)", 1, ("eps",)),
    "sgd": OptimizerRecord("with momentum: Polyak, USSR Comp. Math. 4 (1964)", 1, ("momentum",)),
}
"""By the name that specs use."""
