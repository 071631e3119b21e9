"""Prepare projected queries or keys for attention: optionally normalise each head, then rotate it.

On GPUs a Triton kernel does both in one pass over memory; on other devices and in float64, torch does both. The
backward pass saves the tables, and with the norm also the norm's weight and the unconverted projection.
"""

from __future__ import annotations

from typing import Any

import torch

from partool_kernels.device import KernelCall, choose, launch_options, on, uses_triton
from partool_kernels.direct import Parts, direct, direct_backward
from partool_kernels.registry import Config
from partool_kernels.rope.describe import half_block

Tables = tuple[torch.Tensor, torch.Tensor]
_MOST_TOKENS = 2**30
"""Maximum number of tokens; indices of tokens have 32 bits, and may exceed the last token's index by a tile."""
_MOST_PARTS = 4096
"""Maximum number of parts of a sum over tokens: enough for all multiprocessors, while the parts take little memory."""


def rope(
    heads_BSND: torch.Tensor,
    tables: Tables,
    weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    mode: str = "auto",
) -> torch.Tensor:
    """Return rotated heads ``[B, N, S, D]``, stored token by token, from heads ``[B, S, N, D]`` with any strides.

    ``tables`` are cosine and sine ``[S, D]``; the two halves of a row are equal. The computation is in the type of
    ``tables``, float32 or float64. With ``weight_D`` each head is first divided by the root of its mean square plus
    ``eps``, and multiplied by the weight. ``mode`` is as in :func:`partool_kernels.device.uses_triton`. Raises
    ValueError where shapes or devices do not fit each other, or the head dimension is odd.
    """
    cos_SD, sin_SD = tables
    _check(heads_BSND, cos_SD, sin_SD, weight_D)
    out: torch.Tensor
    if weight_D is None:
        out = _call_rope(heads_BSND, cos_SD, sin_SD, 1.0, mode)
    else:
        out = _call_norm(heads_BSND, weight_D, cos_SD, sin_SD, eps, mode)
    return out.transpose(1, 2)


def reference(heads_BSND: torch.Tensor, tables: Tables, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the rotated heads ``[B, S, N, D]``, computed by torch's operators."""
    if weight_D is not None:
        wide = heads_BSND.to(tables[0].dtype)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        heads_BSND = (wide * scale).to(heads_BSND.dtype) * weight_D
    return _turned(heads_BSND, *tables, 1.0)


def _check(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None) -> None:
    if heads.ndim != 4 or heads.shape[3] % 2:
        raise ValueError(f"heads have to be [B, S, N, D] with an even D, and are {list(heads.shape)}")
    wanted = (heads.shape[1], heads.shape[3])
    if cos.shape != wanted or sin.shape != wanted:
        raise ValueError(f"tables for heads {list(heads.shape)} have to be {list(wanted)}, and are {list(cos.shape)}")
    if weight is not None and weight.shape != wanted[1:]:
        raise ValueError(
            f"a norm's weight for heads {list(heads.shape)} has to be [{wanted[1]}], not {list(weight.shape)}"
        )
    others = [x.device for x in (cos, sin, weight) if x is not None and x.device != heads.device]
    if others:
        raise ValueError(f"heads on {heads.device}, but a table or weight on {others[0]}")


def _turned(heads: torch.Tensor, cos_SD: torch.Tensor, sin_SD: torch.Tensor, turn: float) -> torch.Tensor:
    """Return heads ``[B, S, N, D]`` rotated forward (``turn`` 1.0) or back (``turn`` -1.0)."""
    wide = heads.to(cos_SD.dtype)
    first, second = wide.chunk(2, dim=-1)
    cos_S1D, sin_S1D = cos_SD[:, None], turn * sin_SD[:, None]
    return (wide * cos_S1D + torch.cat((-second, first), dim=-1) * sin_S1D).to(heads.dtype)


def _on_device(mode: str, heads: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether the kernel takes the inputs: float32 tables, and all other tensors of one type."""
    *same, cos, sin = others
    fits = heads.shape[0] * heads.shape[1] <= _MOST_TOKENS and all(x.dtype == heads.dtype for x in same)
    wide = cos.dtype == sin.dtype == torch.float32
    return fits and wide and uses_triton(mode, heads, *same, cos, sin)


def _columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _compute_rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: float, mode: str) -> torch.Tensor:
    if not _on_device(mode, heads, cos, sin):
        return _turned(heads, cos, sin, turn).contiguous()
    out = _like(heads)
    launch("rope", (*map(_columns, (cos, sin, heads)), out), turn)
    return out


_rope = torch.library.custom_op(
    "partool::rope",
    _compute_rope,
    mutates_args=(),
    schema="(Tensor heads, Tensor cos, Tensor sin, float turn, str mode) -> Tensor",
)


@_rope.register_fake
def _(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: float, mode: str) -> torch.Tensor:
    return _like(heads)


def _keep_tables(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, cos, sin, ctx.turn, ctx.mode = inputs
    ctx.save_for_backward(cos, sin)


def _turned_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _call_turned_back(grad, *ctx.saved_tensors, -ctx.turn, ctx.mode), None, None, None, None


_rope.register_autograd(_turned_back, setup_context=_keep_tables)
_call_rope = direct("rope", Parts(_compute_rope, _keep_tables, _turned_back))
_call_turned_back = direct_backward("rope", _compute_rope)


def _compute_norm(heads: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    cos, sin, eps, mode = others
    if not _on_device(mode, heads, weight, cos, sin):
        return reference(heads, (cos, sin), weight, eps).contiguous()
    out = _like(heads)
    launch("rope_norm_forward", (*map(_columns, (cos, sin, weight, heads)), out), eps)
    return out


_norm = torch.library.custom_op(
    "partool::rope_norm",
    _compute_norm,
    mutates_args=(),
    schema="(Tensor heads, Tensor weight, Tensor cos, Tensor sin, float eps, str mode) -> Tensor",
)


@_norm.register_fake
def _(heads: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return _like(heads, torch.promote_types(heads.dtype, weight.dtype))


def _compute_norm_backward(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of heads and weight."""
    heads, weight, cos, sin, eps, mode = arguments
    if not _on_device(mode, heads, grad, weight, cos, sin):
        return _gradients_by_torch(grad, heads, weight, (cos, sin), eps)
    grad_heads, width = _like(heads), heads.shape[3]
    # The weight's gradient is summed in parts, whose number follows from the kernel's tiles.
    config = _config("rope_norm_backward", heads)
    parts = torch.empty(programs(heads, config), width, dtype=torch.float32, device=heads.device)
    inputs = map(_columns, (cos, sin, weight, heads, grad))
    launch("rope_norm_backward", (*inputs, grad_heads, parts), eps, config)
    return grad_heads, parts.sum(0).to(weight.dtype)


_norm_backward = torch.library.custom_op(
    "partool::rope_norm_backward",
    _compute_norm_backward,
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor heads, Tensor weight, Tensor cos, Tensor sin, float eps, str mode) -> (Tensor, Tensor)"
    ),
)


def _gradients_by_torch(
    grad: torch.Tensor, heads: torch.Tensor, weight: torch.Tensor, tables: Tables, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = tables
    # The gradients are written out, as autograd is switched off inside of an operator.
    back, wide = _turned(grad, cos, sin, -1.0).to(cos.dtype), heads.to(cos.dtype)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    of_normed = back * weight
    along = (of_normed * normed).mean(-1, keepdim=True)
    of_weight = (back * normed).sum((0, 1, 2))
    return (scale * (of_normed - normed * along)).to(heads.dtype).contiguous(), of_weight.to(weight.dtype)


@_norm_backward.register_fake
def _(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    heads, weight = arguments[:2]
    return _like(heads), _like(weight)


def _config(name: str, heads: torch.Tensor) -> Config:
    batch, length, count, width = heads.shape
    shape = (("n", count), ("d", width))
    return choose(KernelCall(name, (heads.dtype,), shape, batch * length), heads.device).config


def _grid(heads: torch.Tensor, config: Config) -> tuple[int, int]:
    batch, length, count, _ = heads.shape
    blocks = config.constants
    return -(-batch * length // blocks["BLOCK_T"]), -(-count // blocks["BLOCK_N"])


def _grid_of_sums(heads: torch.Tensor, config: Config) -> tuple[int, int]:
    tokens, heads_apart = _grid(heads, config)
    return min(tokens, _MOST_PARTS), heads_apart


def programs(heads: torch.Tensor, config: Config) -> int:
    """Return the number of parts that the gradient of a norm's weight is summed from."""
    tokens, heads_apart = _grid_of_sums(heads, config)
    return tokens * heads_apart


def launch(name: str, tensors: tuple[torch.Tensor, ...], number: float, config: Config | None = None) -> None:
    """Run the kernel ``name``; ``tensors`` are inputs and outputs, in the order of the kernel's arguments.

    ``number`` is the direction for ``rope``, and epsilon for kernels with a norm. Heads are ``[B, S, N, D]``. Without
    ``config`` the registry chooses the configuration.
    """
    from partool_kernels.rope import kernel

    many = [x for x in tensors if x.ndim == 4]
    heads, cos, sin = many[0], *tensors[:2]
    config = config or _config(name, heads)
    strides = (stride for x in many for stride in x.stride()[:3])
    batch, length, count, width = heads.shape
    sizes = (cos.stride(0), sin.stride(0), batch * length, length, count, width // 2, number)
    grid = (_grid_of_sums if name == "rope_norm_backward" else _grid)(heads, config)
    with on(heads.device):
        getattr(kernel, name)[grid](
            *tensors, *strides, *sizes, BLOCK_D=half_block(width), **launch_options(config, heads.device)
        )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *saved, ctx.eps, ctx.mode = inputs
    ctx.save_for_backward(*saved)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return *_call_norm_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.mode), None, None, None, None


_norm.register_autograd(_gradients, setup_context=_keep)
_call_norm = direct("rope_norm", Parts(_compute_norm, _keep, _gradients))
_call_norm_backward = direct_backward("rope_norm_backward", _compute_norm_backward)
