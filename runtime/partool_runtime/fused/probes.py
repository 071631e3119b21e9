"""Test inputs for each fused part: a few rows at the model's widths, to compare kernels with torch before their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from partool.spec.model import ModelConfig
from partool.spec.training import Fused
from partool_kernels.adamw.op import Tensors, Update, adamw
from partool_kernels.glu.op import glu
from partool_kernels.linear_cross_entropy.op import linear_cross_entropy
from partool_kernels.norm.op import Norm, add_norm
from partool_kernels.rope.op import rope
from partool_runtime.fused.glu import KINDS

ROWS = 24
_NARROW = 64
"""Hidden size in the test of the loss kernels; these kernels depend only on the vocabulary's size."""

Computed = Sequence[torch.Tensor]


class Probe(NamedTuple):
    """The computation of a fused part, and test inputs for it."""

    inputs: tuple[torch.Tensor, ...]
    """Random tensors on the CPU, in float32."""
    run: Callable[[tuple[torch.Tensor, ...], str], Computed]
    """Function that takes inputs (on any device, of any type) and ``kernels.mode``, and returns results."""
    gradients: bool = True
    """Whether the computation has a backward pass."""


def probes(model: ModelConfig, parts: Sequence[Fused]) -> dict[Fused, Probe]:
    """Return the probes of the fused parts ``parts``."""
    makers: dict[Fused, Callable[[ModelConfig], Probe]] = {
        "norm": _norm, "glu": _glu, "rope": _rope, "loss": _loss, "adamw": _adamw
    }  # fmt: skip
    return {part: makers[part](model) for part in parts}


def random_numbers(*sizes: int) -> torch.Tensor:
    """Return normally distributed numbers on the CPU; equal sizes give equal numbers."""
    with torch.device("cpu"):
        return torch.randn(*sizes, generator=torch.Generator().manual_seed(len(sizes) + sum(sizes)))


def _norm(model: ModelConfig) -> Probe:
    kind, width = ("rms" if model.norm == "rmsnorm" else "layer"), model.hidden

    def run(inputs: tuple[torch.Tensor, ...], mode: str) -> Computed:
        x, residual, weight, *bias = inputs
        return add_norm(x, residual, Norm(kind, model.norm_eps, weight, bias[0] if bias else None), mode)

    columns = (random_numbers(width) + 1.0,) if kind == "rms" else (random_numbers(width) + 1.0, random_numbers(width))
    return Probe((random_numbers(ROWS, width), random_numbers(ROWS, width), *columns), run)


def _glu(model: ModelConfig) -> Probe:
    kind = KINDS[model.activation]
    inputs = (random_numbers(ROWS, model.ffn_hidden), random_numbers(ROWS, model.ffn_hidden) + 0.5)
    return Probe(inputs, lambda given, mode: (glu(given[0], given[1], kind, mode),))


def _rope(model: ModelConfig) -> Probe:
    angles_SD = random_numbers(ROWS, model.head_dim // 2).repeat(1, 2)

    def run(inputs: tuple[torch.Tensor, ...], mode: str) -> Computed:
        heads_BSND, *weight = inputs
        wide = torch.promote_types(heads_BSND.dtype, torch.float32)
        angles = angles_SD.to(heads_BSND.device, wide)
        return (
            rope(heads_BSND, (angles.cos(), angles.sin()), weight[0] if weight else None, model.norm_eps, mode=mode),
        )

    weight = (random_numbers(model.head_dim) + 1.0,) if model.qk_norm else ()
    return Probe((random_numbers(1, ROWS, model.heads, model.head_dim), *weight), run)


def _loss(model: ModelConfig) -> Probe:
    with torch.device("cpu"):
        labels_T = torch.arange(ROWS) * 7 % model.vocab
        labels_T[::5] = -100

    def run(inputs: tuple[torch.Tensor, ...], mode: str) -> Computed:
        hidden_TH, weight_VH = inputs
        return (linear_cross_entropy(hidden_TH, weight_VH, labels_T.to(hidden_TH.device), mode=mode),)

    return Probe((random_numbers(ROWS, _NARROW), random_numbers(model.vocab, _NARROW) * 0.1), run)


def _adamw(model: ModelConfig) -> Probe:
    update = Update(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, scale=0.5, step=3)

    def run(inputs: tuple[torch.Tensor, ...], mode: str) -> Computed:
        # The optimizer's numbers are float32 or wider for every type of computation.
        wide = torch.promote_types(inputs[0].dtype, torch.float32)
        parameter, gradient, average, square = (x.to(wide, copy=True) for x in inputs)
        square.abs_()
        adamw(Tensors([parameter], [gradient], [average], [square], [True]), update, mode)
        return parameter, average, square

    return Probe(tuple(random_numbers(ROWS, model.hidden) for _ in range(4)), run, gradients=False)
