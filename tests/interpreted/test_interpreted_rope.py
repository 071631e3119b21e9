"""Rotary embedding in Triton's interpreter, alone and after a norm, against float64."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.cases import BACKWARD, excess
from partool_kernels.registry import Config
from partool_kernels.rope import op
from partool_kernels.rope.op import Tables, reference, rope

EPS = 1e-5


def tables(length: int, width: int) -> Tables:
    angles = torch.outer(torch.arange(length).double(), 100.0 ** -torch.linspace(0, 1, width // 2).double())
    angles = angles.repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def by_torch(heads: torch.Tensor, angles: Tables, weight: torch.Tensor | None) -> torch.Tensor:
    return reference(heads, angles, weight, EPS).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(3, 10), (1, 64)])
def test_results_and_gradients_are_as_exact_as_those_of_torch(
    heads: int, width: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, 2, 7, heads, width).to(dtype).unbind()
    x[0, 1] *= 1e-3  # where eps matters
    weight = torch.randn(width).to(dtype) if normed else None
    angles = tables(7, width)
    leaves = [t.clone().requires_grad_() for t in (x, weight) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in leaves]

    def call(of: list[torch.Tensor], angles: Tables, function: object) -> tuple[torch.Tensor, ...]:
        norm = of[1] if normed else None
        out = rope(of[0], angles, norm, EPS) if function is rope else by_torch(of[0], angles, norm)
        return out, *torch.autograd.grad(out, of, grad.transpose(1, 2).to(out.dtype))

    ours, eager = call(leaves, angles, rope), call(leaves, angles, by_torch)
    exact = call(wide, (angles[0].double(), angles[1].double()), by_torch)
    assert excess(ours[0], eager[0], exact[0]) <= 1
    for one, other, true in zip(ours[1:], eager[1:], exact[1:], strict=True):
        assert excess(one, other, true, BACKWARD) <= 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinities in the interpreter's NumPy
def test_strides_of_any_kind_and_weird_numbers() -> None:
    torch.manual_seed(1)
    angles = tables(5, 8)
    joined = torch.randn(2, 5, 3 * 4 * 8 + 1)[..., 1:]  # queries, keys and values in one tensor, misaligned
    queries = joined.view(2, 5, 12, 8)[:, :, 4:8]
    queries[0, 0, 0, 0], queries[1, 2, 3, 7] = float("inf"), float("nan")
    columns_apart = torch.randn(2, 5, 8, 3).transpose(2, 3)
    weight = torch.randn(16)[::2]
    for heads in (queries, columns_apart):
        for norm in (None, weight):
            got, want = rope(heads, angles, norm, EPS), by_torch(heads, angles, norm)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_wrong_angle_is_seen() -> None:
    """The error bound must reject a rotation that is off by one position."""
    x = torch.randn(1, 6, 2, 8)
    cos, sin = tables(7, 8)
    right, wrong = (cos[:6], sin[:6]), (cos[1:], sin[1:])
    exact = by_torch(x.double(), (right[0].double(), right[1].double()), None)
    assert excess(rope(x, wrong), by_torch(x, right, None), exact) > 1


def test_tokens_may_lie_further_apart_than_32_bits_count() -> None:
    """The memory between the two tokens is never touched."""
    torch.manual_seed(2)
    angles, weight = tables(2, 8), torch.randn(8, dtype=torch.float16)
    near, grad = torch.randn(2, 1, 2, 3, 8, dtype=torch.float16)
    far = torch.empty(2**31 + 24, dtype=torch.float16).as_strided((1, 2, 3, 8), (1, 2**31, 8, 1)).copy_(near)
    for norm in (None, weight):
        assert torch.equal(rope(far, angles, norm, EPS), rope(near, angles, norm, EPS))
    normed = [rope(heads.requires_grad_(), angles, weight, EPS) for heads in (near, far)]
    found = [
        torch.autograd.grad(out, heads, grad.transpose(1, 2))[0] for out, heads in zip(normed, (near, far), strict=True)
    ]
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")  # from masked rows
@pytest.mark.parametrize("eps", [EPS, 0.0])
def test_few_programs_go_through_many_tokens(eps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    monkeypatch.setattr(op, "_MOST_PARTS", 2)
    monkeypatch.setattr(op, "_config", lambda *_: Config((("BLOCK_T", 2), ("BLOCK_N", 2)), num_warps=1))
    heads, weight = torch.randn(2, 7, 3, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    grad, angles = torch.randn(2, 3, 7, 6), tables(7, 6)
    found = torch.autograd.grad(rope(heads, angles, weight, eps), (heads, weight), grad)
    wanted = torch.autograd.grad(reference(heads, angles, weight, eps).transpose(1, 2), (heads, weight), grad)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
