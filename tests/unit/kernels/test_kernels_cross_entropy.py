"""Cross entropy as operators: under torch's compiler, against the formula, and the inputs they refuse."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from partool_kernels.cross_entropy.by_torch import parts_of, write_gradient
from partool_kernels.cross_entropy.op import IGNORED, Terms, cross_entropy, inner_scale, scaled

TERMS = (Terms(), Terms(1e-2), Terms(0.0, 5.0), Terms(1e-2, 5.0))


def random(rows: int = 9, columns: int = 13, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, columns, generator=generator, dtype=torch.float64).mul_(4.0).to(dtype)
    labels = torch.randint(columns, (rows,), generator=generator)
    labels[1::4] = IGNORED
    return logits.requires_grad_(), labels


def plain(logits: torch.Tensor, labels: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Loss by the formula, for torch's autograd."""
    if terms.cap:
        logits = terms.cap * torch.tanh(logits / terms.cap)
    z = logits.logsumexp(-1).square()[labels != IGNORED].sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") + terms.z_loss * z


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("in_place", [False, True])
def test_loss_and_gradient_are_those_of_the_formula(terms: Terms, in_place: bool) -> None:
    logits, labels = random()
    wanted = plain(logits, labels, terms)
    (gradient,) = torch.autograd.grad(wanted * 0.3, logits)
    given = logits.detach().clone().requires_grad_()
    hidden = given * 1.0
    loss = cross_entropy(hidden, labels, terms, in_place=in_place)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    assert torch.equal(hidden, given) is not in_place
    (loss * 0.3).backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad, gradient, rtol=0, atol=1e-12)
    assert bool((given.grad[1::4] == 0).all())


def test_operators_are_what_their_registrations_say() -> None:
    logits, labels = random(5, 7)
    operators, detached = torch.ops.partool, logits.detach()
    terms = {"z_loss": 1e-2, "cap": 5.0, "kernels": "auto"}
    for gradient in (True, False):
        x = logits if gradient else detached
        torch.library.opcheck(operators.cross_entropy, (x, labels), terms | {"gradient": gradient})
    torch.library.opcheck(operators.cross_entropy_, (detached.clone(), labels), terms | {"scale": 0.5})
    torch.library.opcheck(operators.cross_entropy_parts, (detached, labels, 2, 5.0, "auto"))
    sums = detached.logsumexp(1)
    torch.library.opcheck(
        operators.cross_entropy_gradient_, (detached.clone(), labels, sums, sums[0]), terms | {"first": 2}
    )
    torch.library.opcheck(operators.scaled, (detached, sums[0], torch.float32, "auto"))
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, Terms(1e-2, 5.0)), logits)


def test_the_compiler_sees_through() -> None:
    logits, labels = random(5, 7)
    compiled = torch.compile(lambda x: cross_entropy(x * 2.0, labels), backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(plain(logits * 2.0, labels, Terms()), logits)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(logits), logits)[0], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("terms", TERMS)
def test_parts_of_a_vocabulary_make_the_whole(terms: Terms) -> None:
    logits, labels = random(7, 11)
    wanted = plain(logits, labels, terms)
    (gradient,) = torch.autograd.grad(wanted, logits)
    cuts = (0, 4, 4, 10, 11)  # the second part is empty
    parts = [logits.detach()[:, one:two].contiguous() for one, two in pairwise(cuts)]
    found = torch.stack([
        torch.ops.partool.cross_entropy_parts(part, labels, first, terms.cap, "auto")
        for part, first in zip(parts, cuts[:-1], strict=True)
    ])  # fmt: skip
    highest = found[:, 0].amax(0)
    log_totals = (found[:, 1] * (found[:, 0] - highest).exp()).sum(0).log() + highest
    losses = log_totals - found[:, 2].sum(0) + terms.z_loss * log_totals.square()
    torch.testing.assert_close(losses[labels != IGNORED].sum(), wanted.detach(), rtol=0, atol=1e-12)
    for part, first in zip(parts, cuts[:-1], strict=True):
        torch.ops.partool.cross_entropy_gradient_(
            part, labels, log_totals, torch.ones(()), first=first, z_loss=terms.z_loss, cap=terms.cap, kernels="auto"
        )
    torch.testing.assert_close(torch.cat(parts, 1), gradient, rtol=0, atol=1e-12)


def test_a_second_backward_pass_of_what_was_overwritten_elsewhere_is_an_error() -> None:
    logits, labels = random()
    hidden = logits * 1.0
    loss = cross_entropy(hidden.square(), labels, in_place=True)
    loss.backward()  # squares keep their input, not their result
    hidden = (logits * 1.0).exp()
    loss = cross_entropy(hidden, labels, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_keeps_its_values() -> None:
    logits, labels = random()
    before = logits.detach().clone()
    with pytest.raises(ValueError, match="a leaf"):
        cross_entropy(logits, labels, in_place=True)
    assert torch.equal(logits, before)


def test_without_gradients_logits_stay_as_they_are() -> None:
    logits, labels = random()
    before = logits.detach().clone()
    with torch.no_grad():
        total = cross_entropy(logits, labels, in_place=True)
    assert torch.equal(logits, before)
    torch.testing.assert_close(total, plain(logits, labels, Terms()).detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 3])
def test_empty_inputs_and_rows_that_are_all_ignored_have_no_loss(rows: int) -> None:
    logits = torch.full((rows, 5), torch.nan, requires_grad=True)
    total = cross_entropy(logits, torch.full((rows,), IGNORED))
    total.backward()
    assert logits.grad is not None
    assert total.item() == 0.0
    assert bool((logits.grad == 0).all())


def test_numbers_that_are_none_spread_as_they_do_in_torch() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        logits, labels = random(4, 6)
        with torch.no_grad():
            logits[0, 2], labels[0] = bad, 3
        wanted = plain(logits, labels, Terms())
        gradient = torch.autograd.grad(wanted, logits)[0]
        loss = cross_entropy(logits, labels)
        torch.testing.assert_close(loss, wanted, equal_nan=True)
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient, equal_nan=True)


def test_half_precision_gradients_keep_small_probabilities() -> None:
    columns = 2**17
    logits = torch.zeros(1, columns, dtype=torch.float16, requires_grad=True)
    assert inner_scale(torch.float16, columns) == 8.0
    assert inner_scale(torch.bfloat16, columns) == 1.0
    factor = torch.tensor(4096.0)
    (cross_entropy(logits, torch.zeros(1, dtype=torch.int64)) * factor).backward()
    assert logits.grad is not None
    assert float(logits.grad[0, 1]) == pytest.approx(4096.0 / columns, rel=1e-3)


def test_columns_apart_and_rows_apart_count_as_they_are() -> None:
    logits, labels = random(6, 10)
    for view in (logits.detach()[:, ::2], logits.detach().T[:6, :6], logits.detach()[::2]):
        x, chosen = view.requires_grad_(), labels[: len(view)].where(labels[: len(view)] < view.shape[1], IGNORED)
        loss = cross_entropy(x, chosen)
        wanted = plain(x, chosen, Terms())
        torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(wanted, x), rtol=0, atol=1e-12)


def test_a_factor_is_not_rounded_to_the_type_of_what_it_scales() -> None:
    x, factor = torch.full((3, 2), 3.0, dtype=torch.bfloat16), torch.tensor(1.0 + 2.0**-9)
    wide = scaled(x, factor, torch.float32)
    assert float(wide[0, 0]) == 3.0 * (1.0 + 2.0**-9)
    assert scaled(x, factor, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("logits", "labels", "terms", "words"),
    [
        (torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64), Terms(), r"\[2, 4\] on cpu and labels \[3\]"),
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32), Terms(), "int32 labels"),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), Terms(), "int64 logits"),
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), Terms(cap=-1.0), "cap -1.0"),
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), Terms(z_loss=math.nan), "z_loss nan"),
        (torch.zeros(2, 4), torch.tensor([0, 4]), Terms(), "label 4 is none of 4 tokens"),
        (torch.zeros(2, 4), torch.tensor([-1, 0]), Terms(), "label -1 is none of 4 tokens"),
    ],
)
def test_bad_inputs_are_refused(logits: torch.Tensor, labels: torch.Tensor, terms: Terms, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cross_entropy(logits, labels, terms)


def test_references_write_where_they_are_told() -> None:
    logits, labels = random(3, 5)
    out = torch.empty_like(logits)
    parts = parts_of(logits.detach(), labels, 0)
    totals = parts[1].log() + parts[0]
    write_gradient(out, logits.detach(), labels, totals, torch.tensor(2.0))
    wanted = torch.autograd.grad(plain(logits, labels, Terms()) * 2.0, logits)[0]
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
