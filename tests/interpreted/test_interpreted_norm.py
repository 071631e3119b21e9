"""Norms in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.cases import BACKWARD, case, errors, excess
from partool_kernels.device import uses_triton
from partool_kernels.norm.op import Norm, add_norm, norm, reference
from partool_kernels.registry import Config, Request

FLAGS = (("rms",), ("add", "rms"), ("layer",), ("add", "bias", "layer"))
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("flags", FLAGS)
def test_every_way_through_the_kernels_is_as_exact_as_torch(flags: tuple[str, ...], dtype: str) -> None:
    """Rows in one block and in three, several rows per program, and more rows than programs."""
    for name in ("norm_forward", "norm_backward"):
        for block in (128, 32):
            blocks = [("ROWS", 2), ("BLOCK", block)]
            if name == "norm_backward":
                blocks += [("PARTS", 2), ("STAGES", 1)]
            made = case(Request(name, "sm_90", (dtype,), (("n", 77),), 5, flags), CPU)
            assert max(errors(made, Config(tuple(blocks)))) <= 1, (name, block)


def test_columns_of_wide_rows_add_up_in_a_kernel_of_their_own() -> None:
    made = case(Request("norm_weights", "sm_90", ("float32",), (("n", 77),), 7, ("bias", "layer")), CPU)
    config = Config((("ROWS", 2), ("BLOCK", 32), ("PARTS", 2), ("STAGES", 1)))
    assert max(errors(made, config)) <= 1


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_operators_call_them_on_rows_that_lie_apart(kind: str) -> None:
    torch.manual_seed(0)
    both = torch.randn(3, 4, 2 * 33)
    x, residual = (part.detach().requires_grad_() for part in both.chunk(2, dim=2))
    weight, bias = (torch.randn(33, requires_grad=True) for _ in range(2))
    how = Norm(kind, 1e-6, weight, bias if kind == "layer" else None)
    wide = Norm(kind, 1e-6, weight.double(), bias.double() if kind == "layer" else None)
    assert not x.is_contiguous()
    assert uses_triton("auto", x)
    inputs, grads = (x, residual, weight), torch.randn(2, 3, 33, 4).mT.unbind()
    total = x + residual
    ours, eager = add_norm(x, residual, how), (total, reference(total, how))
    exact = (x.double() + residual.double(), reference(x.double() + residual.double(), wide))
    for one, other, true in zip(ours, eager, exact, strict=True):
        assert excess(one, other, true) <= 1
    found = [
        torch.autograd.grad(results, inputs, [grad.to(results[0].dtype) for grad in grads], retain_graph=True)
        for results in (ours, eager, exact)
    ]
    for one, other, true in zip(*found, strict=True):
        assert excess(one, other, true.double(), BACKWARD) <= 1
    turned = torch.randn(33, 7).T
    assert torch.allclose(norm(turned, how), reference(turned, how), rtol=1e-5, atol=1e-6)


def test_roundings_are_those_of_separate_operators() -> None:
    """A sum is rounded before its norm, an RMSNorm before its weight: results do not depend on fusion."""
    torch.manual_seed(3)
    x, residual = torch.randn(2, 5, 77, dtype=torch.float16)
    weight, ones = torch.randn(77, dtype=torch.float16), torch.ones(77, dtype=torch.float16)
    for kind in ("rms", "layer"):
        total, out = add_norm(x, residual, Norm(kind, 1e-6, weight))
        assert torch.equal(total, x + residual)
        assert torch.equal(out, norm(x + residual, Norm(kind, 1e-6, weight)))
    assert torch.equal(norm(x, Norm("rms", 1e-6, weight)), norm(x, Norm("rms", 1e-6, ones)) * weight)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_not_a_number_stays_in_its_row() -> None:
    x = torch.randn(4, 33)
    x[1, 2], x[2, 0] = torch.nan, torch.inf
    for kind in ("rms", "layer"):
        how = Norm(kind, 1e-6, torch.ones(33))
        out, expected = norm(x, how), reference(x, how)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.allclose(out[[0, 3]], expected[[0, 3]], rtol=1e-5, atol=1e-6)


def test_rows_may_lie_further_apart_than_32_bits_count() -> None:
    """Each index fits 32 bits by itself; the memory between rows is never touched."""
    torch.manual_seed(1)
    near, weight = torch.randn(3, 33, dtype=torch.float16), torch.ones(33, dtype=torch.float16)
    far = torch.empty(2**31 + 33, dtype=torch.float16).as_strided((3, 33), (2**30, 1)).copy_(near)
    how = Norm("rms", 1e-6, weight)
    assert torch.equal(norm(far, how), norm(near, how))
    found = [torch.autograd.grad(norm(each.requires_grad_(), how), each, far)[0] for each in (far, near)]
    assert torch.equal(*found)


def test_gradients_of_weights_have_the_same_bits_every_time() -> None:
    made = case(Request("norm_backward", "sm_90", ("float32",), (("n", 40),), 9, ("rms",)), CPU)
    config = Config((("ROWS", 1), ("BLOCK", 64), ("PARTS", 4), ("STAGES", 1)))
    first = [each.clone() for each in made.run(config)]
    assert all(torch.equal(one, other) for one, other in zip(first, made.run(config), strict=True))
