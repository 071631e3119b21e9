"""Gated linear units as an operator: under torch's compiler, and the inputs it refuses."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.glu.op import glu, reference


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_operator_is_what_its_registrations_say(kind: str) -> None:
    torch.manual_seed(0)
    inputs = tuple(torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.partool.glu, (*inputs, kind, "auto"))
    assert torch.autograd.gradcheck(lambda gate, up: glu(gate, up, kind), inputs)
    assert torch.equal(glu(*inputs, kind), reference(*inputs, kind))


def test_empty_inputs_pass() -> None:
    gate = torch.empty(0, 8, requires_grad=True)
    glu(gate, torch.empty(0, 8), "silu").sum().backward()
    assert gate.grad is not None
    assert gate.grad.shape == (0, 8)


@pytest.mark.parametrize(
    ("up", "kind", "words"),
    [
        (torch.zeros(2, 3), "silu", r"\[2, 4\] float32 on cpu and up \[2, 3\]"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), "silu", "bfloat16"),
        (torch.zeros(2, 4), "swish", "no activation 'swish'; there are gelu, gelu_tanh, silu"),
    ],
)
def test_bad_inputs_are_refused(up: torch.Tensor, kind: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        glu(torch.zeros(2, 4), up, kind)
