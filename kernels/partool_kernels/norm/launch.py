"""Launches of the norm kernels on matrices ``[rows, H]``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from partool_kernels.device import KernelCall, choose, launch_options, on
from partool_kernels.norm.describe import POINTERS, STRIDES, derived_constants, one_block
from partool_kernels.registry import Config

Pointers = Mapping[str, torch.Tensor]
"""Tensor arguments of a kernel by name; arguments that the kernel's flags exclude are missing."""


def flat(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as ``[rows, H]`` with contiguous columns; it is copied only where no view is possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def flags_of(kind: str, bias: bool, add: bool) -> tuple[str, ...]:
    """Return a request's flags for a norm of kind ``kind``; ``add`` adds a residual before the norm."""
    return (*(("add",) if add else ()), *(("bias",) if bias else ()), kind)


def chosen(name: str, x: torch.Tensor, flags: tuple[str, ...]) -> Config:
    """Return the configuration that the registry chooses for kernel ``name`` on the matrix ``x``."""
    return choose(KernelCall(name, (x.dtype,), (("n", x.shape[1]),), x.shape[0], flags), x.device).config


def launch(name: str, given: Pointers, flags: tuple[str, ...], config: Config, eps: float | None = None) -> None:
    """Run a kernel; only the forward pass takes ``eps``."""
    from partool_kernels.norm import kernel

    first = given[STRIDES[name][0]]
    rows, columns = first.shape
    constants = config.constants
    pointers = (given.get(each, first) for each in POINTERS[name])
    strides = (given.get(each, first).stride(0) for each in STRIDES[name])
    grid = (programs(rows, config), -(-columns // constants["BLOCK"]) if name == "norm_weights" else 1)
    numbers = (rows, columns) if eps is None else (rows, columns, eps)
    options = derived_constants(name, flags, columns, config) | launch_options(config, first.device)
    with on(first.device):
        getattr(kernel, name)[grid](*pointers, *strides, *numbers, **options)


def programs(rows: int, config: Config) -> int:
    """Return the number of programs that share the rows; a backward pass has at most ``PARTS`` programs."""
    tiles = -(-rows // config.constants["ROWS"])
    return min(tiles, config.constants.get("PARTS", tiles))


def backward(
    given: Pointers, flags: tuple[str, ...], config: Config | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write the gradient of x and return the gradients of weight and bias, in float32, ``[H]``.

    Where no block holds a whole row, a second kernel is needed, which reads the matrices again.
    """
    config = config or chosen("norm_backward", given["x"], flags)
    if one_block(given["x"].shape[1], config):
        return of_columns("norm_backward", given, flags, config)
    launch("norm_backward", given, flags, config)
    rest = tuple(flag for flag in flags if flag != "add")
    return of_columns("norm_weights", given, rest, chosen("norm_weights", given["x"], rest))


def of_columns(
    name: str, given: Pointers, flags: tuple[str, ...], config: Config
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a kernel that sums gradients per program, then add the programs' sums in order and return the totals."""
    x = given["x"]
    size = (2 if "bias" in flags else 1, programs(x.shape[0], config), x.shape[1])
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    launch(name, {**given, "of_weight": parts[0], "of_bias": parts[-1]}, flags, config)
    # The parts are summed separately: results of an operator must not share memory.
    return parts[0].sum(0), parts[1].sum(0) if "bias" in flags else None
