"""Matrices and biases of experts as folders of GPT-OSS hold them: outputs last, gates and inner widths in turns.

``gate_up_proj [E, H, 2·F]`` has outputs of gate and of up in turns, ``down_proj [E, F, H]`` is alone; biases are
``gate_up_proj_bias [E, 2·F]`` and ``down_proj_bias [E, H]``. partool has rows of outputs, expert after expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from partool.spec.model_code import DEQUANTIZE
from partool_runtime.errors import ConfigurationError
from partool_runtime.pieces import in_matrices

Shape = tuple[int, ...]


def parameter_shape(stored: Shape, turns: tuple[int, int]) -> Shape:
    """Return the shape of a parameter in partool from that of the tensor that holds it."""
    experts, *inputs, outputs = stored
    return (experts * outputs // turns[1], *inputs)


def block_in_turns(view: Any, turns: tuple[int, int], rows: int, offsets: Shape, sizes: Shape) -> torch.Tensor:
    """Return a block of a parameter from the open tensor ``view``; an expert has ``rows`` rows in partool."""
    (number, count), parts = turns, []
    inputs = [slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:], strict=True)]
    for expert, cut in in_matrices(offsets[0], offsets[0] + sizes[0], rows):
        of_all = slice(cut.start * count, cut.stop * count)
        read = view[(slice(expert, expert + 1), *inputs, of_all)][0]
        parts.append(read[..., number::count].T if inputs else read[number::count])
    return torch.cat(parts) if parts else torch.empty(sizes)


def joined_in_turns(parts: Mapping[int, torch.Tensor], experts: int) -> torch.Tensor:
    """Return the tensor that a folder holds, from the parameters whose outputs take turns in it, by their number."""
    of_experts = [parts[number].view(experts, -1, *parts[number].shape[1:]) for number in sorted(parts)]
    outputs_first = torch.stack(of_experts, dim=2).flatten(1, 2)
    return (outputs_first.mT if outputs_first.dim() == 3 else outputs_first).contiguous()


def check_plain(names: Mapping[str, Any], path: object) -> None:
    """Raise ConfigurationError PT609 if a folder holds experts' matrices in mxfp4, as blocks of 4 bits and scales."""
    packed = sorted(name for name in names if name.endswith(("_proj_blocks", "_proj_scales")))
    if packed:
        message = f"{path} holds the experts in mxfp4 ({packed[0]} and {len(packed) - 1} more), which is not read"
        raise ConfigurationError("PT609", message, DEQUANTIZE)
