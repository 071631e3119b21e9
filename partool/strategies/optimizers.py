"""Optimizers that specs can name, one record each; docs/guide/optimizers.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass

_STEPS = "tests/unit/runtime/optim/test_optimizer_groups.py::test_steps_are_those_of_torch_by_group"
"""Test that compares every optimizer in this module with another implementation."""


@dataclass(frozen=True)
class OptimizerRecord:
    """Facts about an optimizer."""

    source: str
    moments: tuple[str, ...]
    """Names that checkpoints give a parameter's optimizer state tensors; each tensor has the parameter's size."""
    reads: tuple[str, ...]
    """Settings that this optimizer reads and that some other optimizers ignore."""
    test: str = _STEPS
    """Test that compares the optimizer's steps with another implementation."""
    host: bool = True
    """True: ``partool_kernels.host`` implements the optimizer, so that its state may be in host memory or in files."""
    rest: str = ""
    """If the optimizer updates only whole matrices of layers (:mod:`partool.layout.matrices`), the optimizer of all
    other parameters; else empty."""
    whole_steps: str = ""
    """If data-parallel ranks exchange moves with one bit per element (:mod:`partool.layout.one_bit`), the optimizer of
    the steps whose gradients are averaged in full precision; else empty."""
    norms: bool = False
    """True: steps depend on norms of whole parameters, of which ranks may hold parts."""


OPTIMIZERS: dict[str, OptimizerRecord] = {
    "adamw": OptimizerRecord("Loshchilov and Hutter, arXiv 1711.05101", ("exp_avg", "exp_avg_sq"), ("betas", "eps")),
    "lion": OptimizerRecord("Chen et al., arXiv 2302.06675", ("exp_avg",), ("betas",)),
    "adagrad": OptimizerRecord("Duchi et al., JMLR 12 (2011)", ("sum",), ("eps",)),
    "sgd": OptimizerRecord("with momentum: Polyak, USSR Comp. Math. 4 (1964)", ("momentum",), ("momentum",)),
    "muon": OptimizerRecord(
        "Jordan et al., kellerjordan.github.io/posts/muon; scaling: Liu et al., arXiv 2502.16982",
        ("momentum",),
        ("momentum", "newton_schulz", "betas", "eps"),
        test="tests/unit/runtime/optim/test_muon.py::test_steps_are_those_of_torch_bit_for_bit",
        host=False,
        rest="adamw",
    ),
    "zero_one_adam": OptimizerRecord(
        "Lu et al., arXiv 2202.06009; with other settings 1-bit Adam: Tang et al., arXiv 2102.02888",
        ("exp_avg", "exp_avg_sq"),
        ("betas", "eps", "one_bit"),
        test="tests/unit/runtime/optim/test_one_bit.py::test_full_steps_are_those_of_adamw_bit_for_bit",
        host=False,
        whole_steps="adamw",
    ),
    "zero_one_lamb": OptimizerRecord(
        "1-bit LAMB: Li et al., arXiv 2104.06069, with the exchanges of zero_one_adam",
        ("exp_avg", "exp_avg_sq"),
        ("betas", "eps", "adapt", "norm_bounds", "one_bit"),
        test="tests/unit/runtime/optim/test_one_bit.py::test_steps_of_lamb_keep_the_mean_ratio_of_full_steps",
        host=False,
        norms=True,
        whole_steps="lamb",
    ),
    "lamb": OptimizerRecord(
        "You et al., arXiv 1904.00962",
        ("exp_avg", "exp_avg_sq"),
        ("betas", "eps", "adapt", "norm_bounds"),
        test="tests/unit/runtime/optim/test_lamb.py::test_steps_are_those_of_the_paper",
        host=False,
        norms=True,
    ),
}
"""Name of an optimizer in specs → facts about the optimizer."""
