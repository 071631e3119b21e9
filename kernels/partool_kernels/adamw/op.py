"""AdamW with decoupled weight decay as one operator, which on GPUs updates many tensors in one launch.

Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. Arithmetic is in float32. Gradients are multiplied by the factor
of clipping and loss scaling while they are read, which saves a separate pass over the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Any

import torch

from partool_kernels.device import KernelCall, choose, launch_options, on, uses_triton
from partool_kernels.registry import Config
from partool_kernels.registry.dtypes import TRITON_TYPE

_COLUMNS = 7
"""Number of columns in the table that the kernel reads; the table has a row per parameter."""


@dataclass(frozen=True, slots=True)
class Update:
    """Hyperparameters of one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float
    """Factor that multiplies the gradients before the update."""
    step: int
    """Number of the step, counted from 1."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors of one step; the i-th gradient and the i-th moments belong to the i-th parameter."""

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    exp_avgs: Sequence[torch.Tensor]
    exp_avg_sqs: Sequence[torch.Tensor]
    decays: Sequence[bool]
    """For each parameter, True if weight decay applies."""

    def rows(self) -> list[tuple[torch.Tensor, ...]]:
        """Return a tuple per parameter, which holds the parameter, its gradient and its two moments."""
        return list(zip(self.parameters, self.gradients, self.exp_avgs, self.exp_avg_sqs, strict=True))


def adamw(tensors: Tensors, update: Update, mode: str = "auto") -> None:
    """Update parameters and moments in place; gradients are not changed.

    ``mode`` is as in :func:`partool_kernels.device.uses_triton`. Tensors that the kernel does not take (see
    :func:`takes`) are updated by torch, slowly. Raises ValueError where the lists differ in length, or where a
    parameter, its gradient and its moments differ in shape or device.
    """
    lists = (tensors.parameters, tensors.gradients, tensors.exp_avgs, tensors.exp_avg_sqs)
    numbers = [*map(len, lists), len(tensors.decays)]
    if len(set(numbers)) > 1:
        raise ValueError(f"parameters, gradients, moments and decays have to be as many of each, and are {numbers}")
    for place, row in enumerate(tensors.rows()):
        if len({(x.shape, x.device) for x in row}) > 1:
            shapes = ", ".join(f"{list(x.shape)} on {x.device}" for x in row)
            raise ValueError(f"tensor {place}: parameter, gradient and moments have to be alike, and are {shapes}")
    torch.ops.partool.adamw(*map(list, lists), list(tensors.decays), *astuple(update), mode)


def takes(tensors: Tensors, mode: str) -> bool:
    """Return whether the kernel takes the tensors.

    All tensors have to be on one GPU. Parameters and moments have to be contiguous float32; gradients may have any
    type that the kernel can read.
    """
    rows = [row for row in tensors.rows() if row[0].numel()]
    # Gradients are checked once per type, not once per tensor, as this check runs in every step.
    gradients = {row[1].dtype: row[1] for row in rows}
    wide = all(x.dtype == torch.float32 and x.is_contiguous() for row in rows for x in (row[0], *row[2:]))
    if not rows or not wide or len({row[0].device for row in rows}) > 1:
        return False
    return uses_triton(mode, rows[0][0], *gradients.values())


def reference(row: tuple[torch.Tensor, ...], decays: bool, update: Update) -> None:
    """Update the tensors of one row of :meth:`Tensors.rows` by torch's operators, in the parameter's type."""
    parameter, gradient, average, square = row
    scaled = gradient.to(parameter.dtype) * update.scale
    if decays:
        parameter.mul_(1 - update.lr * update.weight_decay)
    average.lerp_(scaled, 1 - update.beta1)
    square.mul_(update.beta2).addcmul_(scaled, scaled, value=1 - update.beta2)
    root = (1 - update.beta2**update.step) ** 0.5
    parameter.addcdiv_(average, (square.sqrt() / root).add_(update.eps), value=-_step_size(update))


def _step_size(update: Update) -> float:
    return update.lr / (1 - update.beta1**update.step)


@torch.library.custom_op(
    "partool::adamw",
    mutates_args=("parameters", "exp_avgs", "exp_avg_sqs"),
    schema=(
        "(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, bool[] decays,"
        " float lr, float beta1, float beta2, float eps, float weight_decay, float scale, int step, str kernels) -> ()"
    ),
)
def _adamw(parameters: list[torch.Tensor], gradients: list[torch.Tensor], *others: Any) -> None:
    averages, squares, decays, *numbers, mode = others
    tensors, update = Tensors(parameters, gradients, averages, squares, decays), Update(*numbers)
    if takes(tensors, mode):
        launch(tensors, update)
    else:
        for row, decayed in zip(tensors.rows(), decays, strict=True):
            reference(row, decayed, update)


@_adamw.register_fake
def _(parameters: list[torch.Tensor], gradients: list[torch.Tensor], *others: Any) -> None:
    return None


def launch(tensors: Tensors, update: Update, config: Config | None = None) -> None:
    """Launch the kernel once per type of gradients; without ``config`` the registry chooses the configuration."""
    rows = [(row, decays) for row, decays in zip(tensors.rows(), tensors.decays, strict=True) if row[0].numel()]
    for dtype in sorted({row[1].dtype for row, _ in rows}, key=str):
        _launch([(row, decays) for row, decays in rows if row[1].dtype == dtype], update, config)


def _launch(places: list[tuple[tuple[torch.Tensor, ...], bool]], update: Update, config: Config | None) -> None:
    from partool_kernels.adamw import kernel

    # Copies of non-contiguous gradients live until the launch is queued; their memory is reused only after it.
    rows = [tuple(x.contiguous() for x in row) for row, _ in places]
    device, dtype = rows[0][0].device, rows[0][1].dtype
    sizes = tuple(row[0].numel() for row in rows)
    config = config or choose(KernelCall("adamw", (torch.float32, dtype), (), sum(sizes)), device).config
    block = config.constants["BLOCK"]
    firsts = (0, *accumulate(-(-size // block) for size in sizes))
    table = [
        number
        for row, size, first, (_, decays) in zip(rows, sizes, firsts, places, strict=False)
        for number in (*(x.data_ptr() for x in row), size, first, int(decays))
    ]
    rests = (update.beta1, 1 - update.beta1, update.beta2, 1 - update.beta2)
    root = (1 - update.beta2**update.step) ** -0.5
    numbers = (1 - update.lr * update.weight_decay, *rests, _step_size(update), root, update.eps, update.scale)
    with on(device):
        kernel.adamw[(firsts[-1],)](
            _table(tuple(table), device),
            _owners(sizes, block, device),
            *numbers,
            GRADIENT=TRITON_TYPE[str(dtype).removeprefix("torch.")],
            **launch_options(config, device),
        )


@functools.lru_cache(maxsize=4)
def _table(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return ``numbers`` as a table on the device.

    Tables are cached, as allocators often give gradients the same addresses in every step.
    """
    table = torch.tensor(numbers, dtype=torch.int64).view(-1, _COLUMNS)
    if device.type == "cpu":
        return table
    # The table is copied from pinned memory: a copy from pageable memory would wait for all work queued before it.
    return table.pin_memory().to(device, non_blocking=True)


@functools.lru_cache(maxsize=4)
def _owners(sizes: tuple[int, ...], block: int, device: torch.device) -> torch.Tensor:
    """Return a tensor that holds, for every program, the index of the table row that the program works on."""
    counts = [-(-size // block) for size in sizes]
    places = torch.arange(len(sizes), dtype=torch.int32)
    return torch.repeat_interleave(places, torch.tensor(counts), output_size=sum(counts)).to(device)
