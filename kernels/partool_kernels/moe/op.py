"""Permute tokens so that each expert's rows are contiguous, and permute and sum the experts' results back to tokens.

Routing is a stable sort of the chosen experts, as in MegaBlocks (Gale et al., arXiv 2211.15841, section 5.2). No token
is dropped for lack of capacity, an expert may get no rows, and results do not depend on the order in which programs
run. Between the two permutations, grouped products apply the experts (``torch.nn.functional.grouped_mm``, which takes
``Routing.ends`` as int32).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from partool_kernels.device import KernelCall, choose, launch_options, on, uses_triton
from partool_kernels.registry import Config


class Routing(NamedTuple):
    """Placement of the K choices of T tokens in T · K rows: first all rows of expert 0, then of expert 1, and so on."""

    places: torch.Tensor
    """Row index of every choice, int64 ``[T, K]``; each row has one choice. An expert's rows are in the order of the
    tokens."""
    ends: torch.Tensor
    """Index after each expert's last row, int64 ``[E]``. Rows from ``ends[-1]`` on belong to no expert of this rank and
    are zeros."""

    @property
    def counts(self) -> torch.Tensor:
        """Number of rows of every expert, int64 ``[E]``."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))


def route(experts_TK: torch.Tensor, experts: int) -> Routing:
    """Return the placement of rows for ``experts_TK``, the indices of the experts that each token chooses.

    Choices outside of ``0 <= expert < experts`` belong to experts of other ranks: their rows come last, are zeros and
    contribute nothing. The host does not wait for the device. Raises ValueError unless ``experts_TK`` has two
    dimensions and an integer type, and for ``experts`` below 1.
    """
    if experts_TK.dim() != 2 or experts_TK.is_floating_point() or experts < 1:
        raise ValueError(f"choices are integers [tokens, choices], not {_words(experts_TK)}; experts: {experts}")
    flat = experts_TK.reshape(-1)
    # Narrow keys need fewer passes of a radix sort.
    keys = torch.where((flat < 0) | (flat >= experts), experts, flat).to(torch.int32)
    sorted_, order = torch.sort(keys, stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    every = torch.arange(experts, dtype=torch.int32, device=order.device)
    return Routing(places.view(experts_TK.shape), torch.searchsorted(sorted_, every, right=True))


def permute(x_TH: torch.Tensor, routing: Routing, mode: str = "auto") -> torch.Tensor:
    """Return the rows ``[T · K, H]`` of tokens ``x_TH``; each expert's rows are contiguous.

    A token's gradient is the sum of the gradients of its K rows. ``mode`` is as in
    :func:`partool_kernels.device.uses_triton`. Raises ValueError if ``routing`` is for another number of tokens.
    """
    if x_TH.dim() != 2 or len(routing.places) != len(x_TH):
        raise ValueError(f"{_words(x_TH)} cannot be permuted: routed were {len(routing.places)} tokens")
    rows: torch.Tensor = torch.ops.partool.moe_permute(x_TH, routing.places, routing.ends, mode)
    return rows


def unpermute(
    rows_RH: torch.Tensor, routing: Routing, weights_TK: torch.Tensor | None = None, mode: str = "auto"
) -> torch.Tensor:
    """Return for every token the weighted sum of its K rows, ``[T, H]`` in the type of ``rows_RH``.

    Without ``weights_TK`` all weights are 1. Sums are computed in float32, for float64 rows in float64, in the order of
    a token's choices. Raises ValueError where shapes do not fit.
    """
    places = routing.places
    if rows_RH.dim() != 2 or len(rows_RH) != places.numel():
        raise ValueError(f"rows {_words(rows_RH)} are not those of {list(places.shape)} choices")
    if weights_TK is not None and weights_TK.shape != places.shape:
        raise ValueError(f"weights {_words(weights_TK)} are not those of {list(places.shape)} choices")
    out: torch.Tensor = torch.ops.partool.moe_unpermute(rows_RH, places, routing.ends, weights_TK, mode)
    return out


def _words(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def reference_permute(x_TH: torch.Tensor, places_TK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return the permuted rows, computed by torch's operators."""
    rows_RH = x_TH.index_select(0, _tokens(places_TK))
    return rows_RH.masked_fill_(_beyond(ends_E, len(rows_RH)), 0) if _lacks_rows(places_TK, ends_E) else rows_RH


def reference_unpermute(
    rows_RH: torch.Tensor, places_TK: torch.Tensor, ends_E: torch.Tensor, weights_TK: torch.Tensor | None
) -> torch.Tensor:
    """Return the tokens' weighted sums, computed by torch's operators."""
    wide = torch.promote_types(rows_RH.dtype, torch.float32)
    found_RH = rows_RH.to(wide)
    if _lacks_rows(places_TK, ends_E):
        found_RH = found_RH.masked_fill(_beyond(ends_E, len(rows_RH)), 0)
    weights_TK = None if weights_TK is None else weights_TK.to(wide)
    # A lookup that adds up each token's rows has no copies of all of them.
    sums_TH = F.embedding_bag(places_TK, found_RH, mode="sum", per_sample_weights=weights_TK)
    return sums_TH.to(rows_RH.dtype)


def _tokens(places_TK: torch.Tensor) -> torch.Tensor:
    """Return the token of each row, int64 ``[R]``."""
    places_R = places_TK.reshape(-1)
    choices = torch.arange(len(places_R), device=places_R.device)
    return torch.empty_like(places_R).scatter_(0, places_R, choices // places_TK.shape[1])


def _beyond(ends_E: torch.Tensor, rows: int) -> torch.Tensor:
    """Return which rows belong to no expert of this rank, bool ``[R, 1]``."""
    return (torch.arange(rows, device=ends_E.device) >= ends_E[-1])[:, None]


def _lacks_rows(places_TK: torch.Tensor, ends_E: torch.Tensor) -> bool:
    """Return False if every row is known to have an expert; only on a CPU this can be read without waiting."""
    return ends_E.device.type != "cpu" or int(ends_E[-1]) < places_TK.numel()


@torch.library.custom_op(
    "partool::moe_permute",
    mutates_args=(),
    schema="(Tensor x, Tensor places, Tensor ends, str mode) -> Tensor",
)
def _permute(x: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, mode: str) -> torch.Tensor:
    if not uses_triton(mode, x, places):
        return reference_permute(x, places, ends)
    rows = x.new_empty(places.numel(), x.shape[1])
    launch("moe_permute", (_rows(x), rows), (places.contiguous(), ends[-1:]))
    return rows


@_permute.register_fake
def _(x: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, mode: str) -> torch.Tensor:
    return x.new_empty(places.numel(), x.shape[1])


@torch.library.custom_op(
    "partool::moe_unpermute",
    mutates_args=(),
    schema="(Tensor rows, Tensor places, Tensor ends, Tensor? weights, str mode) -> Tensor",
)
def _unpermute(
    rows: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor | None, mode: str
) -> torch.Tensor:
    if not uses_triton(mode, rows, weights, places):
        return reference_unpermute(rows, places, ends, weights)
    out = rows.new_empty(len(places), rows.shape[1])
    flat = None if weights is None else weights.contiguous()
    launch("moe_unpermute", (_rows(rows), out), (places.contiguous(), ends[-1:], flat))
    return out


@_unpermute.register_fake
def _(
    rows: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor | None, mode: str
) -> torch.Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


@torch.library.custom_op(
    "partool::moe_unpermute_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor places, Tensor ends, Tensor weights, str mode) -> (Tensor, Tensor)",
)
def _unpermute_backward(  # noqa: PLR0917
    grad: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if not uses_triton(mode, grad, rows, weights):
        return _reference_backward(grad, rows, (places, ends), weights)
    grad_rows, grad_weights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
    narrow = (places.contiguous(), ends[-1:], weights.contiguous(), grad_weights)
    launch("moe_unpermute_backward", (_rows(grad), _rows(rows), grad_rows), narrow)
    return grad_rows, grad_weights


@_unpermute_backward.register_fake
def _(  # noqa: PLR0917
    grad: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _reference_backward(
    grad_TH: torch.Tensor,
    rows_RH: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    weights_TK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    places_TK, ends_E = routing
    wide = torch.promote_types(rows_RH.dtype, torch.float32)
    upper_RH = grad_TH.to(wide).index_select(0, _tokens(places_TK))
    products_RH = upper_RH * rows_RH.to(wide)
    if _lacks_rows(places_TK, ends_E):
        beyond_R1 = _beyond(ends_E, len(rows_RH))
        upper_RH.masked_fill_(beyond_R1, 0)
        products_RH.masked_fill_(beyond_R1, 0)
    grad_weights = products_RH.sum(dim=-1)[places_TK].to(weights_TK.dtype)
    weights_R = torch.empty_like(upper_RH[:, 0]).scatter_(0, places_TK.reshape(-1), weights_TK.to(wide).reshape(-1))
    return upper_RH.mul_(weights_R[:, None]).to(rows_RH.dtype), grad_weights


def launch(
    name: str,
    wide: tuple[torch.Tensor, ...],
    narrow: tuple[torch.Tensor | None, ...],
    config: Config | None = None,
) -> None:
    """Run one of the three kernels; without ``config`` the registry chooses the configuration.

    ``wide`` are the matrices with H columns. ``narrow`` are the other tensors: places, the end of the last expert's
    rows as ``[1]``, weights, and the weights' gradient. Both tuples are in the order of the kernel's arguments.
    """
    from partool_kernels.moe import kernel

    (places, _, weights), like = (*narrow, None)[:3], wide[0]
    assert places is not None
    (tokens, choices), columns, device = places.shape, like.shape[1], like.device
    summed = name == "moe_unpermute"
    flags = ("weighted",) if summed and weights is not None else ()
    types = (like.dtype, like.dtype if weights is None else weights.dtype)
    call = KernelCall(name, types, (("h", columns), ("k", choices)), tokens, flags)
    config = config or choose(call, device).config
    constants = {"CHOICES": choices} | ({"WEIGHTED": bool(flags)} if summed else {})
    grid = (tokens, -(-columns // config.constants["BLOCK"]))
    if name == "moe_unpermute_backward":
        grid = (tokens * choices, 1)
    strides = tuple(x.stride(0) for x in wide)
    with on(device):
        getattr(kernel, name)[grid](*wide, *narrow, *strides, columns, **constants, **launch_options(config, device))


def _keep_permuted(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, places, ends, ctx.mode = inputs
    ctx.save_for_backward(places, ends)


def _of_permuted(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.partool.moe_unpermute(grad, *ctx.saved_tensors, None, ctx.mode), None, None, None


def _keep_summed(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, places, ends, weights, ctx.mode = inputs
    # Without weights the backward pass only copies rows of the output's gradient and does not need the rows.
    ctx.save_for_backward(None if weights is None else rows, places, ends, weights)


def _of_summed(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    rows, places, ends, weights = ctx.saved_tensors
    if weights is None:
        return torch.ops.partool.moe_permute(grad, places, ends, ctx.mode), None, None, None, None
    grads = torch.ops.partool.moe_unpermute_backward(grad, rows, places, ends, weights, ctx.mode)
    return grads[0], None, None, grads[1], None


_permute.register_autograd(_of_permuted, setup_context=_keep_permuted)
_unpermute.register_autograd(_of_summed, setup_context=_keep_summed)
