"""Norms as operators: under torch's compiler, the tensors they save, and the inputs they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from partool_kernels.norm.op import Norm, add_norm, norm, reference
from partool_runtime.model.norm import RMSNorm

KINDS = ["rms", "layer", "layer without bias"]


def how(kind: str, size: int = 5, dtype: torch.dtype = torch.float64, **wanted: Any) -> Norm:
    weight, bias = (torch.randn(size, dtype=dtype, **wanted) for _ in range(2))
    return Norm(kind.split(maxsplit=1)[0], 1e-5, weight, bias if kind == "layer" else None)


def leaves(given: Norm) -> tuple[torch.Tensor, ...]:
    return (given.weight,) if given.bias is None else (given.weight, given.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_what_their_registrations_say(kind: str) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given = how(kind, requires_grad=True)
    rest = (given.weight, given.bias, given.eps, given.kind, "auto")
    if kind == "layer without bias":
        torch.library.opcheck(torch.ops.partool.norm, (x, *rest))
    else:
        torch.library.opcheck(torch.ops.partool.add_norm, (x, residual, *rest))

    def of(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return norm(x, Norm(given.kind, given.eps, *parameters))

    def of_sum(x: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return add_norm(x, residual, Norm(given.kind, given.eps, *parameters))

    assert torch.autograd.gradcheck(of, (x, *leaves(given)))
    assert torch.autograd.gradcheck(of_sum, (x, residual, *leaves(given)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_model(kind: str, dtype: torch.dtype) -> None:
    """Results are equal to the bit, so that fused and unfused models differ only in their backward passes."""
    torch.manual_seed(1)
    x, residual = torch.randn(2, 3, 7, 5, dtype=dtype)
    given = how(kind, dtype=dtype)
    if kind == "rms":
        module = RMSNorm(5, given.eps)
        module.weight = torch.nn.Parameter(given.weight)
        expected = module(x + residual).detach()
    else:
        expected = F.layer_norm(x + residual, (5,), given.weight, given.bias, given.eps)
    total, out = add_norm(x, residual, given)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, expected)
    assert torch.equal(norm(total, given), expected)
    assert torch.equal(reference(total, given), expected)


@pytest.mark.parametrize("size", [(0, 5), (2, 0, 5), (3, 0)])
def test_empty_inputs_pass(size: tuple[int, ...]) -> None:
    for kind in KINDS:
        x = torch.zeros(size, requires_grad=True)
        given = how(kind, size[-1], torch.float32, requires_grad=True)
        total, out = add_norm(x, torch.zeros(size), given)
        (total.sum() + out.sum()).backward()
        assert x.grad is not None
        assert x.grad.shape == size
        assert all(each.grad is not None and not each.grad.any() for each in leaves(given))


def test_one_result_of_two_may_be_left_unused() -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    given = how("rms")
    by_torch = torch.autograd.grad(reference(x + x, given).square().sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(add_norm(x, x, given)[1].square().sum(), x)[0], by_torch)
    assert torch.equal(torch.autograd.grad(add_norm(x, x, given)[0].sum(), x)[0], torch.full_like(x, 2.0))


def test_what_is_kept_is_what_was_normalised_and_its_statistics() -> None:
    """Neither the normalised rows nor a float32 tensor of their size is saved."""
    kept: list[torch.Tensor] = []

    def keep(each: torch.Tensor) -> torch.Tensor:
        kept.append(each)
        return each

    x = torch.randn(6, 64, dtype=torch.bfloat16, requires_grad=True)
    given = how("rms", 64, torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        total, _ = add_norm(x, torch.randn(6, 64, dtype=torch.bfloat16), given)
    assert sum(each.untyped_storage().nbytes() for each in kept) == 2 * 6 * 64 + 2 * 64 + 4 * 6
    assert any(each.data_ptr() == total.data_ptr() for each in kept)


def test_not_a_number_stays_in_its_row() -> None:
    x = torch.randn(4, 5)
    x[1, 2], x[2, 0] = torch.nan, torch.inf
    for kind in KINDS:
        out = norm(x, how(kind, dtype=torch.float32))
        assert out[[0, 3]].isfinite().all()
        assert out[1].isnan().all()
        assert out[2, 0].isnan()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "batch"}, "no norm 'batch'; there are layer, rms"),
        ({"bias": torch.zeros(4)}, "a norm of kind 'rms' has no bias"),
        ({"weight": torch.zeros(3)}, r"weight \[3\] float32 on cpu does not fit x \[2, 4\] float32 on cpu"),
        ({"weight": torch.zeros(4, dtype=torch.bfloat16)}, "bfloat16 on cpu does not fit"),
        ({"kind": "layer", "bias": torch.zeros(1)}, r"bias \[1\]"),
    ],
)
def test_bad_norms_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        norm(torch.zeros(2, 4), Norm("rms", 1e-5, torch.ones(4))._replace(**changes))


def test_bad_inputs_are_refused() -> None:
    given = Norm("rms", 1e-5, torch.ones(4))
    with pytest.raises(ValueError, match=r"x \[2, 4\] float32 on cpu and residual \[1, 4\]"):
        add_norm(torch.zeros(2, 4), torch.zeros(1, 4), given)
    with pytest.raises(ValueError, match="int64"):
        norm(torch.zeros(2, 4, dtype=torch.int64), given)
    with pytest.raises(ValueError, match=r"x \[\]"):
        norm(torch.tensor(1.0), given)
