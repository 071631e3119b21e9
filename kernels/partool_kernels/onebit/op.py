"""Compression of gradients to one bit per element, with error feedback.

The scheme is that of 1-bit Adam (Tang et al., arXiv 2102.02888, section 3) and 0/1 Adam (Lu et al., arXiv 2202.06009,
section 4): send the signs of ``x + error`` and a scale, and add the compression error to the next x. Both papers use a
scale per tensor. A scale per chunk loses less precision and is computed while the chunk is in registers. The kernel
passes over memory once and moves 12.1 bytes per element; a chain of torch's operators moves about 80 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from partool_kernels.device import KernelCall, choose, launch_options, on, uses_triton
from partool_kernels.onebit import native
from partool_kernels.onebit.describe import CHUNKS, NORMS
from partool_kernels.registry import Config


class OneBitTensor(NamedTuple):
    """A compressed tensor."""

    bits: torch.Tensor
    """uint8 ``[chunks, chunk / 8]``: bit i of byte j is set where element 8 j + i is zero or positive."""
    scales: torch.Tensor
    """``[chunks]``: the magnitude that all elements of a chunk share, in float32 (float64 for float64 input)."""


def pack(x: torch.Tensor, error: torch.Tensor, chunk: int = 2048, norm: str = "l2", mode: str = "auto") -> OneBitTensor:
    """Compress ``x + error``, and write the compression error to ``error``.

    ``error`` is contiguous, has the shape of ``x``, and is float32, or float64 if ``x`` is. ``norm`` defines a scale:
    ``l1`` is the mean magnitude, which has the smallest error; ``l2`` is the root mean square, as in DeepSpeed. The
    last chunk may be shorter. An infinity or NaN in a chunk makes the chunk's scale infinite or NaN and its errors
    useless, so check the scales with ``isfinite``. Raises ValueError for other shapes, types, chunks or norms; ``mode``
    is as in ``partool_kernels.device.uses_triton``.
    """
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else None
    if error.shape != x.shape or error.dtype != wide or error.device != x.device or not error.is_contiguous():
        raise ValueError(f"the error {_words(error)} of x {_words(x)}: contiguous float32 (float64) of its shape")
    if chunk not in CHUNKS or norm not in NORMS:
        raise ValueError(f"chunks of {chunk}, norm {norm!r}; there are {', '.join(map(str, CHUNKS))} and l1, l2")
    return OneBitTensor(*torch.ops.partool.onebit_pack(x, error, chunk, norm, mode))


def unpack(packed: OneBitTensor, size: int, dtype: torch.dtype = torch.float32, mode: str = "auto") -> torch.Tensor:
    """Decompress a tensor of ``size`` elements, or the tensors of several senders, and return the tensor or their mean.

    The tensors of several senders have bits ``[senders, chunks, chunk / 8]`` and scales ``[senders, chunks]``; they are
    added in the order of the senders. Raises ValueError where the tensors do not hold ``size`` elements.
    """
    bits, scales = packed
    chunk = bits.shape[-1] * 8
    fits = bits.dim() in (2, 3) and bits.dtype == torch.uint8 and scales.shape == bits.shape[:-1]
    if not fits or chunk not in CHUNKS or bits.shape[-2] != -(-size // chunk) or len(bits) == 0 < size:
        raise ValueError(f"bits {_words(bits)} and scales {_words(scales)} are not those of {size} elements")
    if bits.dim() == 2:
        bits, scales = bits[None], scales[None]
    out: torch.Tensor = torch.ops.partool.onebit_unpack(bits, scales, size, dtype, mode)
    return out


def _words(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def reference_pack(
    x: torch.Tensor, error: torch.Tensor, chunk: int, norm: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return bits, scales and the new error (flat), computed by torch's operators in the error's type."""
    value = x.reshape(-1).to(error.dtype) + error.reshape(-1)
    size, chunks = value.numel(), -(-value.numel() // chunk)
    rows = torch.nn.functional.pad(value, (0, chunks * chunk - size)).view(chunks, chunk)
    counts = (size - chunk * torch.arange(chunks, device=x.device)).clamp_max(chunk)
    scales = rows.abs().sum(1) / counts if norm == "l1" else (rows.square().sum(1) / counts).sqrt()
    above = value >= 0
    lost = value - torch.where(above, 1, -1) * scales.repeat_interleave(chunk)[:size]
    set_ = torch.nn.functional.pad(above, (0, chunks * chunk - size)).view(chunks, chunk // 8, 8)
    weights = 1 << torch.arange(8, dtype=torch.int32, device=x.device)
    return (set_ * weights).sum(2).to(torch.uint8), scales, lost


def reference_unpack(bits: torch.Tensor, scales: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean of the senders' decompressed tensors, computed by torch's operators."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    signs = ((bits[..., None] >> places) & 1).flatten(2).to(scales.dtype) * 2 - 1
    return (signs * scales[..., None]).mean(0).flatten()[:size].to(dtype)


@torch.library.custom_op(
    "partool::onebit_pack",
    mutates_args={"error"},
    # The mode is named ``kernels``: torch passes arguments of in-place operators by name, and has a ``mode`` itself.
    schema="(Tensor x, Tensor(a!) error, int chunk, str norm, str kernels) -> (Tensor, Tensor)",
)
def _pack(
    x: torch.Tensor, error: torch.Tensor, chunk: int, norm: str, kernels: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if not uses_triton(kernels, x, error):
        if native.takes(kernels, x, error):
            bits, scales = _empty(x, error, chunk)
            native.pack(x.contiguous(), error, bits, scales, norm)
            return bits, scales
        bits, scales, lost = reference_pack(x, error, chunk, norm)
        error.view(-1).copy_(lost)
        return bits, scales
    bits, scales = _empty(x, error, chunk)
    launch_pack((x.contiguous(), error, error), OneBitTensor(bits, scales), norm)
    return bits, scales


@_pack.register_fake
def _(x: torch.Tensor, error: torch.Tensor, chunk: int, norm: str, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x, error, chunk)


def _empty(x: torch.Tensor, error: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = -(-x.numel() // chunk)
    return x.new_empty(chunks, chunk // 8, dtype=torch.uint8), error.new_empty(chunks)


@torch.library.custom_op(
    "partool::onebit_unpack",
    mutates_args=(),
    schema="(Tensor bits, Tensor scales, SymInt size, ScalarType dtype, str mode) -> Tensor",
)
def _unpack(bits: torch.Tensor, scales: torch.Tensor, size: int, dtype: torch.dtype, mode: str) -> torch.Tensor:
    out = scales.new_empty(size, dtype=dtype)
    if not uses_triton(mode, bits, scales, out):
        if native.takes(mode, bits, scales, out):
            native.unpack(bits.contiguous(), scales.contiguous(), out)
            return out
        return reference_unpack(bits, scales, size, dtype)
    launch_unpack(OneBitTensor(bits.contiguous(), scales.contiguous()), out)
    return out


@_unpack.register_fake
def _(bits: torch.Tensor, scales: torch.Tensor, size: int, dtype: torch.dtype, mode: str) -> torch.Tensor:
    return scales.new_empty(size, dtype=dtype)


def launch_pack(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    packed: OneBitTensor,
    norm: str,
    config: Config | None = None,
) -> None:
    """Run the kernel on contiguous x, old error and new error.

    Without ``config`` the registry chooses the configuration.
    """
    from partool_kernels.onebit import kernel

    x, _, _ = tensors
    chunk = packed.bits.shape[-1] * 8
    call = KernelCall("onebit_pack", (x.dtype,), (("chunk", chunk),), x.numel(), (norm,))
    config = config or choose(call, x.device).config
    with on(x.device):
        kernel.onebit_pack[len(packed.bits),](
            *tensors, *packed, x.numel(), NORM=norm, CHUNK=chunk, **launch_options(config, x.device)
        )


def launch_unpack(packed: OneBitTensor, out: torch.Tensor, config: Config | None = None) -> None:
    """Run the kernel on contiguous tensors of several senders.

    Without ``config`` the registry chooses the configuration.
    """
    from partool_kernels.onebit import kernel

    bits, scales = packed
    senders, chunks, chunk = len(bits), bits.shape[1], bits.shape[2] * 8
    call = KernelCall("onebit_unpack", (out.dtype,), (("chunk", chunk), ("senders", senders)), out.numel())
    config = config or choose(call, out.device).config
    grid = (-(-out.numel() // config.constants["BLOCK"]),)
    options = launch_options(config, out.device)
    with on(out.device):
        kernel.onebit_unpack[grid](bits, scales, out, out.numel(), chunks, senders, CHUNK=chunk, **options)
