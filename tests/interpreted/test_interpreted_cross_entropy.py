"""Cross entropy in Triton's interpreter, against float64, within the error bound relative to eager torch."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from partool_kernels.cases import BACKWARD, excess
from partool_kernels.cross_entropy import op
from partool_kernels.cross_entropy.op import IGNORED, Terms, cross_entropy, scaled
from partool_kernels.device import uses_triton
from partool_kernels.registry import Config

TERMS = (Terms(), Terms(1e-2, 5.0))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the block so small that rows take several blocks."""
    config = Config((("BLOCK", 32),), num_warps=4, num_stages=1)
    monkeypatch.setattr(op, "_choice", lambda *arguments: config)


def random(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, columns, generator=generator).mul_(4.0).to(dtype)
    labels = torch.randint(columns, (rows,), generator=generator)
    labels[1::4] = IGNORED
    return logits, labels


def by_torch(terms: Terms, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    wide = terms.cap * torch.tanh(wide / terms.cap) if terms.cap else wide
    z = wide.logsumexp(-1).square()[labels != IGNORED].sum()
    return F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum") + terms.z_loss * z


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("in_place", [True, False])
def test_losses_and_gradients_are_as_exact_as_those_of_torch(terms: Terms, dtype: torch.dtype, in_place: bool) -> None:
    logits, labels = random(5, 77, dtype)
    assert uses_triton("auto", logits)
    ours = partial(cross_entropy, terms=terms, in_place=in_place)
    results = []
    for function, values in (
        (ours, logits),
        (partial(by_torch, terms), logits),
        (partial(by_torch, terms), logits.double()),
    ):
        x = values.clone().requires_grad_()
        loss = function(x * 1.0, labels)
        results.append((loss.detach(), torch.autograd.grad(loss * 0.3, x)[0]))
    (loss, gradient), (loss_of_torch, gradient_of_torch), (true_loss, true_gradient) = results
    assert excess(loss, loss_of_torch, true_loss) <= 1
    assert excess(gradient, gradient_of_torch, true_gradient, BACKWARD) <= 1


def test_parts_of_a_vocabulary_make_the_whole() -> None:
    logits, labels = random(4, 70, torch.float32)
    terms = Terms(1e-2, 5.0)
    given = logits.double().requires_grad_()
    wanted = torch.autograd.grad(by_torch(terms, given, labels), given)[0]
    parts = [logits[:, :33].contiguous(), logits[:, 33:]]  # the second part's rows are not contiguous
    found = torch.stack([
        torch.ops.partool.cross_entropy_parts(part, labels, first, terms.cap, "auto")
        for part, first in zip(parts, (0, 33), strict=True)
    ])  # fmt: skip
    highest = found[:, 0].amax(0)
    log_totals = (found[:, 1] * (found[:, 0] - highest).exp()).sum(0).log() + highest
    losses = log_totals - found[:, 2].sum(0) + terms.z_loss * log_totals.square()
    torch.testing.assert_close(losses[labels != IGNORED].sum().double(), by_torch(terms, logits.double(), labels))
    for part, first in zip(parts, (0, 33), strict=True):
        torch.ops.partool.cross_entropy_gradient_(
            part, labels, log_totals, torch.ones(()), first=first, z_loss=terms.z_loss, cap=terms.cap, kernels="auto"
        )
    torch.testing.assert_close(torch.cat(parts, 1), wanted.float())


def test_numbers_that_are_none_spread_as_they_do_in_torch() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        logits, labels = random(2, 40, torch.float32)
        logits[0, 2], labels[0] = bad, 3
        logits[1] = math.nan  # ignored
        given, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        wanted = by_torch(Terms(), given[:1], labels[:1])
        with np.errstate(invalid="ignore"):  # the interpreter computes with NumPy
            loss = cross_entropy(ours, labels)
        torch.testing.assert_close(loss, wanted, equal_nan=True)
        gradient = torch.autograd.grad(loss, ours)[0]
        torch.testing.assert_close(gradient[:1], torch.autograd.grad(wanted, given)[0][:1], equal_nan=True)
        assert bool((gradient[1] == 0).all())


def test_first_blocks_of_minus_infinity_say_nothing() -> None:
    logits, labels = random(1, 90, torch.float32)
    logits[0, :64], labels[0] = -math.inf, 70
    torch.testing.assert_close(cross_entropy(logits, labels), by_torch(Terms(), logits, labels))


def test_labels_that_are_no_columns_make_the_loss_nan() -> None:
    logits, labels = random(1, 40, torch.float32)
    labels[0] = 40
    given = logits.clone().requires_grad_()
    loss = cross_entropy(given, labels)
    assert bool(loss.isnan())
    assert bool(torch.autograd.grad(loss, given)[0].isnan().all())


def test_rows_that_share_memory_are_copied_before_they_are_overwritten() -> None:
    labels = torch.tensor([1, 5, 9, IGNORED])
    for shape, strides in (((4, 37), (0, 1)), ((4, 37), (5, 1)), ((4, 37), (1, 4))):
        memory, results = torch.randn(200, generator=torch.Generator().manual_seed(1)), []
        for loss in (partial(cross_entropy, in_place=True), partial(by_torch, Terms())):
            x = memory.clone().requires_grad_()
            total = loss((x * 1.0).as_strided(shape, strides), labels)
            results.append((total.detach(), torch.autograd.grad(total, x)[0]))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("strides", [(0, 1), (5, 1), (1, 4)])
def test_operators_refuse_to_overwrite_rows_that_share_memory(strides: tuple[int, int]) -> None:
    logits, labels = torch.randn(200).as_strided((4, 37), strides), torch.tensor([1, 5, 9, IGNORED])
    before, operators, words = logits.clone(), torch.ops.partool, {"z_loss": 0.0, "cap": 0.0, "kernels": "auto"}
    with pytest.raises(ValueError, match="cannot be overwritten"):
        operators.cross_entropy_(logits, labels, scale=1.0, **words)
    with pytest.raises(ValueError, match="cannot be overwritten"):
        operators.cross_entropy_gradient_(logits, labels, torch.zeros(4), torch.ones(()), first=0, **words)
    assert torch.equal(logits, before)


def test_scaling_rounds_once() -> None:
    x, factor = torch.randn(3, 77), torch.tensor(0.3)
    torch.testing.assert_close(scaled(x, factor, torch.float16), (x * factor).half())


def test_rows_may_lie_far_apart(tmp_path: Path) -> None:
    """The third row begins 2³¹ elements after the first, in a sparse file that holds only the pages written."""
    stride, columns = 2**30 + 8, 40
    path = tmp_path / "rows"
    with path.open("wb") as file:
        file.truncate(2 * (2 * stride + columns))
    memory = torch.from_file(str(path), shared=True, size=2 * stride + columns, dtype=torch.float16)
    far, labels = torch.as_strided(memory, (3, columns), (stride, 1)), torch.tensor([3, 7, 30])
    for shared in (False, True):
        far.copy_(random(3, columns, torch.float16)[0])
        logits = far.float().requires_grad_()
        loss = by_torch(Terms(), logits, labels)
        (gradient,) = torch.autograd.grad(loss, logits)
        operators, words = torch.ops.partool, {"z_loss": 0.0, "cap": 0.0, "kernels": "auto"}
        if shared:
            highest, sums, targets = operators.cross_entropy_parts(far, labels, 0, 0.0, "auto")
            totals = highest + sums.log()
            operators.cross_entropy_gradient_(far, labels, totals, torch.ones(()), first=0, **words)
            losses = totals - targets
        else:
            losses = operators.cross_entropy_(far, labels, scale=1.0, **words)
        torch.testing.assert_close(losses.sum(), loss.detach())
        torch.testing.assert_close(far.float(), gradient, rtol=2e-3, atol=2e-3)
