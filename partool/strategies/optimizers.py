"""Optimizers that specs can name, one record each; docs/guide/optimizers.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass

_STEPS = "tests/unit/test_optimizer_groups.py::test_steps_are_those_of_torch_by_group"
"""It asks for another implementation of each optimizer that has a record."""


@dataclass(frozen=True)
class OptimizerRecord:
    """Facts about an optimizer."""

    source: str
    moments: tuple[str, ...]
    """Tensors as large as the parameter that it keeps beside the weight, by the names that checkpoints give them."""
    reads: tuple[str, ...]
    """Settings that it reads, of those that not all optimizers read."""
    test: str = _STEPS
    """The test that compares its steps with another implementation."""
    host: bool = True
    """``partool_kernels.host`` has a pass for it, so that its state may lie in host memory or in files."""


OPTIMIZERS: dict[str, OptimizerRecord] = {
    "adamw": OptimizerRecord("Loshchilov and Hutter, arXiv 1711.05101", ("exp_avg", "exp_avg_sq"), ("betas", "eps")),
    "lion": OptimizerRecord("Chen et al., arXiv 2302.06675", ("exp_avg",), ("betas",)),
    "adagrad": OptimizerRecord("Duchi et al., JMLR 12 (2011)", ("sum",), ("eps",)),
    "sgd": OptimizerRecord("with momentum: Polyak, USSR Comp. Math. 4 (1964)", ("momentum",), ("momentum",)),
}
"""By the name that specs use."""
