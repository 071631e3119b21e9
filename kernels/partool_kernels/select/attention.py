"""Select the fastest kernel of ``scaled_dot_product_attention`` for attention over whole sequences.

Kernels are timed with their backward passes on random queries, keys and values. ``math`` materialises all scores and
is tried on GPUs only where no other kernel works. FlashAttention 3 and 4 replace torch's ``flash`` in the whole process
(``torch.nn.attention.activate_flash_attention_impl``); FlexAttention is compiled before its first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from partool_kernels.select.selector import Answer, Candidate, NothingWorksError, Question, Selector

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of queries ``[B, N, S, D]``, keys and values ``[B, K, S, D]``; returns ``[B, N, S, D]``."""

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_IMPLEMENTATIONS = {"flash3": "FA3", "flash4": "FA4"}


class HeadSizes(NamedTuple):
    """Sizes of the queries, keys and values of an attention call."""

    batch: int
    queries: int
    keys: int
    """Number of heads of keys and values; the number of query heads is a multiple of this number."""
    length: int
    width: int
    """Dimension of a head."""


def attention(
    selector: Selector, heads: HeadSizes, dtype: torch.dtype, device: torch.device, *, also: tuple[str, ...] = ()
) -> tuple[Attend, Answer]:
    """Return the fastest causal attention for ``heads``, and the answer that tells how it was chosen.

    ``also`` holds other names to try, ``flex`` or names from :func:`newer`. A chosen implementation from :func:`newer`
    replaces torch's ``flash`` in the whole process. Raises :class:`NothingWorksError`.
    """
    usual = ("flash", "math") if device.type == "cpu" else ("flash", "cudnn", "efficient")
    answer = _choose(selector, heads, (dtype, device), (*usual, *also))
    if answer.name in _IMPLEMENTATIONS:
        try:
            torch.nn.attention.activate_flash_attention_impl(_IMPLEMENTATIONS[answer.name])
        except Exception as error:  # an import may raise any type; the package existed when an earlier process chose it
            absent = {answer.name: f"{type(error).__name__}: {error}"}
            answer = _choose(selector, heads, (dtype, device), tuple(x for x in (*usual, *also) if x != answer.name))
            answer = replace(answer, excluded=answer.excluded | absent)
    # Without a measurement torch chooses by itself.
    return (plain if answer.source == "default" else by(answer.name)), answer


def _choose(
    selector: Selector, heads: HeadSizes, where: tuple[torch.dtype, torch.device], names: tuple[str, ...]
) -> Answer:
    try:
        return selector.choose(problem(heads, *where, names))
    except NothingWorksError:
        if "math" in names:
            raise
        return selector.choose(problem(heads, *where, ("math",)))


def plain(q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor) -> torch.Tensor:
    """Return the causal attention, computed by the kernel that torch chooses."""
    grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
    return F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped)


def by(name: str) -> Attend:
    """Return the attention function that uses the kernel ``name``."""
    if name == "flex":
        return _flex
    return functools.partial(_by_backend, _BACKENDS["flash" if name in _IMPLEMENTATIONS else name])


def _by_backend(backend: SDPBackend, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return plain(q_BNSD, k_BKSD, v_BKSD)


def _flex(q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor) -> torch.Tensor:
    run, mask_of = _compiled_flex()
    mask = mask_of(q_BNSD.shape[2], q_BNSD.device)
    grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
    return cast(torch.Tensor, run(q_BNSD, k_BKSD, v_BKSD, block_mask=mask, enable_gqa=grouped))


@functools.cache
def _compiled_flex() -> tuple[Callable[..., Any], Callable[[int, torch.device], Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    @functools.cache
    def mask(length: int, device: torch.device) -> Any:
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)

    return torch.compile(flex_attention, dynamic=False), mask


def newer(device: torch.device) -> tuple[str, ...]:
    """Return the names of other implementations of ``flash`` that this torch and device support.

    An implementation raises an error when it is tried without its package.
    """
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None or torch.version.hip is not None or device.type != "cuda":
        return ()
    major = torch.cuda.get_device_capability(device)[0]
    return ("flash3",) if major == 9 else ("flash4",) if major == 10 else ()


def problem(heads: HeadSizes, dtype: torch.dtype, device: torch.device, names: tuple[str, ...]) -> Question:
    """Return a :class:`Question`, whose answer is the fastest of the named kernels."""

    def candidates() -> Sequence[Candidate]:
        generator = torch.Generator(device).manual_seed(0)
        batch, queries, keys, length, width = heads
        # Tensors are strided like a model's projections, which are stored token by token.
        grad, q, k, v = (
            torch.randn(batch, length, count, width, dtype=dtype, device=device, generator=generator).transpose(1, 2)
            for count in (queries, queries, keys, keys)
        )
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        return [
            Candidate(
                name,
                functools.partial(_both, by(name), inputs, grad),
                functools.partial(_activated, name) if name in _IMPLEMENTATIONS else nullcontext,
            )
            for name in names
        ]

    key = (*heads._asdict().items(), ("dtype", str(dtype).removeprefix("torch.")))
    return Question("attention", key, names, candidates)


@contextmanager
def _activated(name: str) -> Iterator[None]:
    """Replace torch's ``flash`` by the named implementation within the context."""
    torch.nn.attention.activate_flash_attention_impl(_IMPLEMENTATIONS[name])
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def _both(attend: Attend, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the result of attention and the gradients of the inputs."""
    with torch.enable_grad():
        out = attend(*inputs)
        return (out, *torch.autograd.grad(out, inputs, grad))
