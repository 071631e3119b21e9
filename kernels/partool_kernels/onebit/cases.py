"""Calls of the kernels of 1-bit compression, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import FORWARD, Case
from partool_kernels.onebit.op import (
    OneBitTensor,
    launch_pack,
    launch_unpack,
    reference_pack,
    reference_unpack,
)
from partool_kernels.registry import Config, Request


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``onebit_pack``, whose results are bits, scales and errors, or a call of ``onebit_unpack``."""
    make = _pack if request.kernel == "onebit_pack" else _unpack
    return make(request, device, torch.Generator(device).manual_seed(seed))


def _pack(request: Request, device: torch.device, generator: torch.Generator) -> Case:
    chunk, (norm,), size = request.width["chunk"], request.flags, request.rows
    x = torch.randn(size, dtype=getattr(torch, request.dtypes[0]), device=device, generator=generator)
    before = torch.randn(size, device=device, generator=generator)
    chunks = -(-size // chunk)
    packed = OneBitTensor(
        torch.empty(chunks, chunk // 8, dtype=torch.uint8, device=device), torch.empty(chunks, device=device)
    )
    # The errors go to another tensor, so that every call has the same inputs.
    lost = torch.empty_like(before)

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch_pack((x, before, lost), packed, norm, config)
        return (*packed, lost)

    return Case(
        run=run,
        eager=lambda: reference_pack(x, before, chunk, norm),
        exact=lambda: reference_pack(x.double(), before.double(), chunk, norm),
        factors=(0.0, FORWARD, FORWARD),
    )


def _unpack(request: Request, device: torch.device, generator: torch.Generator) -> Case:
    chunk, senders, size = request.width["chunk"], request.width["senders"], request.rows
    dtype, chunks = getattr(torch, request.dtypes[0]), -(-size // chunk)
    shape = (senders, chunks, chunk // 8)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand(senders, chunks, device=device, generator=generator)
    out = torch.empty(size, dtype=dtype, device=device)

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch_unpack(OneBitTensor(bits, scales), out, config)
        return (out,)

    return Case(
        run=run,
        eager=lambda: (reference_unpack(bits, scales, size, dtype),),
        exact=lambda: (reference_unpack(bits, scales.double(), size, torch.float64),),
        factors=(FORWARD,),
    )
