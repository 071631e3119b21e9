"""AdamW as an operator: its registrations, its fallback in torch, and the inputs it refuses."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.adamw.op import Tensors, Update, adamw, takes

UPDATE = Update(0.1, 0.9, 0.95, 1e-8, 0.3, 0.5, 1)


def tensors(dtype: torch.dtype = torch.float64) -> Tensors:
    rows = [[torch.randn(size, dtype=dtype) for size in ((5, 3), (4,), (0,))] for _ in range(4)]
    rows[3] = [x.square() for x in rows[3]]
    return Tensors(*rows, decays=[True, False, False])


def test_operator_is_what_its_registrations_say() -> None:
    torch.manual_seed(0)
    made = tensors()
    lists = (made.parameters, made.gradients, made.exp_avgs, made.exp_avg_sqs, made.decays)
    torch.library.opcheck(torch.ops.partool.adamw, (*map(list, lists), 0.1, 0.9, 0.95, 1e-8, 0.3, 0.5, 1, "auto"))


def test_torch_computes_what_its_own_optimizer_does() -> None:
    torch.manual_seed(0)
    made = tensors()
    for moment in (*made.exp_avgs, *made.exp_avg_sqs):
        moment.zero_()
    theirs = [x.clone().requires_grad_() for x in made.parameters]
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(1, 6):
        for parameter, gradient in zip(theirs, made.gradients, strict=True):
            gradient.normal_()
            parameter.grad = gradient * 0.5
        optimizer.step()
        adamw(made, Update(0.1, 0.9, 0.95, 1e-8, 0.3, 0.5, step))
    for ours, other in zip(made.parameters, theirs, strict=True):
        torch.testing.assert_close(ours, other.detach(), rtol=1e-14, atol=1e-14)


def test_what_does_not_fit_is_refused() -> None:
    made = tensors()
    with pytest.raises(ValueError, match=r"as many of each, and are \[3, 2, 3, 3, 3\]"):
        adamw(Tensors(made.parameters, made.gradients[:2], made.exp_avgs, made.exp_avg_sqs, made.decays), UPDATE)
    swapped = list(made.gradients)[::-1]
    with pytest.raises(ValueError, match=r"tensor 0: .* \[5, 3\] on cpu, \[0\] on cpu"):
        adamw(Tensors(made.parameters, swapped, made.exp_avgs, made.exp_avg_sqs, made.decays), UPDATE)


def test_nothing_runs_where_no_kernel_does() -> None:
    assert not takes(tensors(), "auto")
    assert not takes(tensors(torch.float32), "torch")
    adamw(Tensors([], [], [], [], []), UPDATE)
