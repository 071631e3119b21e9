"""Rotary embedding as an operator: under torch's compiler, and the inputs it refuses."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.registry import ARCHITECTURES, Request
from partool_kernels.rope.describe import KERNELS
from partool_kernels.rope.op import rope
from partool_runtime.model.norm import RMSNorm
from partool_runtime.model.rope import rotate


def tables(length: int = 5, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(length, width // 2, dtype=torch.float64).repeat(1, 2)
    return angles.cos(), angles.sin()


def test_operators_are_what_their_registrations_say() -> None:
    torch.manual_seed(0)
    heads = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    angles = tables()
    torch.library.opcheck(torch.ops.partool.rope, (heads, *angles, 1.0, "auto"))
    torch.library.opcheck(torch.ops.partool.rope_norm, (heads, weight, *angles, 1e-5, "auto"))
    assert torch.autograd.gradcheck(lambda heads: rope(heads, angles), (heads,))
    assert torch.autograd.gradcheck(lambda heads, weight: rope(heads, angles, weight, 1e-5), (heads, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_without_a_gpu_it_is_what_the_model_computes_bit_by_bit(kind: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, norm = torch.randn(2, 5, 3, 6).to(dtype), RMSNorm(6, 1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    angles = tables()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = (angles[0].to(wide), angles[1].to(wide))
    assert torch.equal(rope(heads, angles), rotate(heads.transpose(1, 2), angles))
    got = rope(heads, angles, norm.weight, norm.eps)
    assert torch.equal(got, rotate(norm(heads).transpose(1, 2), angles))
    assert got.transpose(1, 2).is_contiguous()  # stored token by token


def test_no_heads_and_no_tokens_pass() -> None:
    for size in ((2, 5, 0, 6), (0, 5, 3, 6), (2, 0, 3, 6)):
        heads, weight = torch.empty(size, requires_grad=True), torch.ones(6, requires_grad=True)
        cos, sin = (x.float() for x in tables(size[1]))
        rope(heads, (cos, sin), weight, 1e-5).sum().backward()
        assert heads.grad is not None
        assert heads.grad.shape == size
        assert weight.grad is not None
        assert not weight.grad.any()


@pytest.mark.parametrize(
    ("size", "width", "weight", "words"),
    [
        ((2, 5, 3, 7), 7, None, r"even D, and are \[2, 5, 3, 7\]"),
        ((2, 5, 3), 6, None, r"\[B, S, N, D\]"),
        ((2, 4, 3, 6), 6, None, r"have to be \[4, 6\], and are \[5, 6\]"),
        ((2, 5, 3, 6), 6, 5, r"has to be \[6\], not \[5\]"),
    ],
)
def test_bad_inputs_are_refused(size: tuple[int, ...], width: int, weight: int | None, words: str) -> None:
    angles = (torch.zeros(5, width), torch.zeros(5, width))
    with pytest.raises(ValueError, match=words):
        rope(torch.zeros(size), angles, None if weight is None else torch.ones(weight), 1e-5)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_configuration_takes_the_tile_and_covers_all_heads(kernel) -> None:  # type: ignore[no-untyped-def]
    for heads, width in ((1, 2), (7, 80), (32, 128), (128, 256)):
        for architecture in ARCHITECTURES:
            request = Request(kernel.name, architecture, ("float32",), (("n", heads), ("d", width)), 3)
            for config in (kernel.default(request), *kernel.configs(request)):
                blocks = kernel.signature(request, config).constants
                assert blocks["BLOCK_D"] >= width / 2
                assert blocks["BLOCK_T"] * blocks["BLOCK_N"] * blocks["BLOCK_D"] <= 8192
