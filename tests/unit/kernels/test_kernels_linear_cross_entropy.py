"""Output matrix and cross entropy in one operator, in chunks, against the plain formula."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from partool_kernels.cases import BACKWARD, excess
from partool_kernels.cross_entropy.op import IGNORED, Terms
from partool_kernels.linear_cross_entropy import chunks
from partool_kernels.linear_cross_entropy.chunks import How, Inputs, WantedGradients, add_product, losses_and_gradients
from partool_kernels.linear_cross_entropy.op import linear_cross_entropy
from partool_kernels.registry.chunking import chunk_rows
from partool_runtime.model.loss import LossKernels
from partool_runtime.parallel.tensor import vocabulary

TERMS = (Terms(), Terms(1e-2, 3.0))


def _alone(parts_3C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return parts_3C[1].log() + parts_3C[0], parts_3C[2]


@pytest.mark.parametrize("label", [7, -1])
@pytest.mark.parametrize("early", [None, True, False])
def test_labels_that_no_rank_has_make_loss_and_gradient_nan(
    monkeypatch: pytest.MonkeyPatch, label: int, early: bool | None
) -> None:
    hidden, weight, labels = random(bias=False)
    labels[0] = label
    if early is None:
        how = How(mode="auto", merge=_alone, vocabulary=7)
        found = losses_and_gradients(
            Inputs(hidden.detach(), weight.detach(), None, labels), how, WantedGradients(*[True] * 3)
        )
        total, gradient = found.total, found.hidden
    else:
        monkeypatch.setattr(vocabulary, "_of_all_ranks", lambda seen, team: _alone(torch.stack([*seen])))
        team: Any = SimpleNamespace(length=None, ranks=1, loss_tile=0, overlap=False)
        kernels = LossKernels("auto", early=early, vocabulary=7)
        total = vocabulary.vocabulary_loss(
            hidden[None], weight, labels[None], first=0, team=team, sum_input=False, kernels=kernels
        )
        (gradient,) = torch.autograd.grad(total, hidden)
    assert bool(total.isnan())
    assert gradient is not None
    assert bool(gradient[0].isnan().all())
    assert bool(gradient[1:].isfinite().all())


def random(*, bias: bool, dtype: torch.dtype = torch.float64, tokens: int = 11) -> tuple[torch.Tensor, ...]:
    """Return a hidden state ``[T, 5]``, a weight ``[7, 5]``, labels, and a bias or None."""
    generator = torch.Generator().manual_seed(5)
    found = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((tokens, 5), (7, 5), (7,))]
    hidden, weight, offsets = (x.to(dtype).requires_grad_() for x in found)
    labels = torch.randint(7, (tokens,), generator=generator)
    labels[2::5] = IGNORED
    return (hidden, weight, labels, offsets) if bias else (hidden, weight, labels)


def plain(
    terms: Terms, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = terms.cap * torch.tanh(logits / terms.cap) if terms.cap else logits
    z = logits.logsumexp(-1).square()[labels != IGNORED].sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") + terms.z_loss * z


def fused(terms: Terms, rows: int, *inputs: torch.Tensor) -> torch.Tensor:
    hidden, weight, labels, *bias = inputs
    return linear_cross_entropy(hidden, weight, labels, bias=bias[0] if bias else None, terms=terms, rows=rows)


def of(function: Any, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the loss and the gradients of all inputs that require one."""
    loss = function(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss * 0.3, [x for x in inputs if x.requires_grad])]


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("rows", [0, 1, 4, 11, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(terms: Terms, rows: int, bias: bool) -> None:
    inputs = random(bias=bias)
    for ours, theirs in zip(of(partial(fused, terms, rows), inputs), of(partial(plain, terms), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [9, 40])
def test_low_precision_is_as_exact_as_torch(dtype: torch.dtype, rows: int) -> None:
    low = random(bias=True, dtype=dtype, tokens=72)
    exact = tuple(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in low)
    results = [of(partial(fused, Terms(), rows), low), of(partial(plain, Terms()), low)]
    for ours, eager, true in zip(*results, of(partial(plain, Terms()), exact), strict=True):
        assert excess(ours, eager, true, BACKWARD) <= 1


def test_operator_is_what_its_registrations_say() -> None:
    hidden, weight, labels, bias = random(bias=True)
    words = {"z_loss": 1e-2, "cap": 3.0, "rows": 4, "kernels": "auto"}
    needs = {"needs_hidden": True, "needs_weight": True, "needs_bias": True}
    operator = torch.ops.partool.linear_cross_entropy
    torch.library.opcheck(operator, (hidden, weight, bias, labels), words | needs)
    frozen = weight.detach()
    torch.library.opcheck(operator, (hidden, frozen, None, labels), words | dict.fromkeys(needs, False) | {
        "needs_hidden": True
    })  # fmt: skip
    half = tuple(x.detach().bfloat16() for x in (hidden, weight))
    torch.library.opcheck(operator, (*half, None, labels), words | dict.fromkeys(needs, False) | {"rows": 1})
    assert torch.autograd.gradcheck(lambda *x: fused(TERMS[1], 4, x[0], x[1], labels, x[2]), (hidden, weight, bias))


def test_only_gradients_that_are_needed_are_computed() -> None:
    hidden, weight, labels = random(bias=False)
    inputs = Inputs(hidden.detach(), weight.detach(), None, labels)
    found = losses_and_gradients(inputs, How(rows=4), WantedGradients(True, False, False))
    assert (found.weight, found.bias) == (None, None)
    with torch.no_grad():
        total = fused(Terms(), 4, hidden, weight, labels)
    torch.testing.assert_close(total, plain(Terms(), hidden, weight, labels).detach(), rtol=0, atol=1e-12)
    assert not total.requires_grad
    frozen = linear_cross_entropy(hidden, weight.detach(), labels)
    frozen.backward()
    assert weight.grad is None


def test_a_backward_pass_can_be_repeated() -> None:
    hidden, weight, labels = random(bias=False)
    loss = linear_cross_entropy(hidden, weight, labels)
    once = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    torch.testing.assert_close(once, torch.autograd.grad(loss, [hidden, weight]), rtol=0, atol=0)


def test_three_dimensions_views_and_no_rows() -> None:
    hidden, weight, labels = random(bias=False, tokens=12)
    whole = linear_cross_entropy(hidden, weight, labels)
    for views in (
        (hidden.view(3, 4, 5), labels.view(3, 4)),
        (hidden.view(3, 4, 5).transpose(0, 1), labels.view(3, 4).T),
    ):
        torch.testing.assert_close(linear_cross_entropy(views[0], weight, views[1]), whole, rtol=0, atol=1e-12)
    turned = weight.detach().T.contiguous().T
    torch.testing.assert_close(linear_cross_entropy(hidden, turned, labels), whole, rtol=0, atol=1e-12)
    nothing = linear_cross_entropy(hidden[:0], weight, labels[:0])
    nothing.backward()
    assert nothing.item() == 0.0
    assert weight.grad is not None
    assert bool((weight.grad == 0).all())


def test_parts_of_a_vocabulary_sum_up() -> None:
    """Two parts, whose exchange is simulated: a first call records each part's values, a second one combines them."""
    hidden, weight, labels = random(bias=False)
    wanted = of(partial(plain, TERMS[1]), (hidden, weight, labels))
    cuts, rows = ((0, 3), (3, 7)), 4
    seen: list[list[torch.Tensor]] = [[], []]

    def note(part: int, parts_3C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen[part].append(parts_3C.clone())
        return parts_3C[0], parts_3C[2]

    inputs = [Inputs(hidden.detach(), weight.detach()[a:b], None, labels) for a, b in cuts]
    for part, (first, _) in enumerate(cuts):
        how = How(TERMS[1], rows, "auto", first, partial(note, part))
        losses_and_gradients(inputs[part], how, WantedGradients(False, False, False))
    both = [torch.stack(pair) for pair in zip(*seen, strict=True)]
    assert len(both) == 3
    of_hidden = torch.zeros_like(hidden)
    for part, (first, _) in enumerate(cuts):
        chunks = iter(both)

        def merge(_: torch.Tensor, chunks: Any = chunks) -> tuple[torch.Tensor, torch.Tensor]:
            found = next(chunks)
            highest = found[:, 0].amax(0)
            return (found[:, 1] * (found[:, 0] - highest).exp()).sum(0).log() + highest, found[:, 2].sum(0)

        result = losses_and_gradients(
            inputs[part], How(TERMS[1], rows, "auto", first, merge), WantedGradients(True, True, False)
        )
        assert result.hidden is not None
        assert result.weight is not None
        torch.testing.assert_close(result.total, wanted[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(result.weight * 0.3, wanted[2][cuts[part][0] : cuts[part][1]], rtol=0, atol=1e-12)
        of_hidden += result.hidden * 0.3
    torch.testing.assert_close(of_hidden, wanted[1], rtol=0, atol=1e-12)


def test_many_chunks_of_half_precision_are_summed_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = random(bias=False, dtype=torch.bfloat16, tokens=100)
    inputs, needs = Inputs(hidden.detach(), weight.detach(), None, labels), WantedGradients(False, True, False)
    few = losses_and_gradients(inputs, How(rows=25), needs).weight
    many = losses_and_gradients(inputs, How(rows=24), needs).weight
    assert few is not None
    assert many is not None
    assert (few.dtype, many.dtype) == (torch.bfloat16, torch.float32)
    monkeypatch.setattr(chunks, "_adds_wide", lambda *_: False)
    total = torch.zeros(2, 2)
    add_product(total, torch.full((8, 2), 200.0, dtype=torch.float16), torch.full((8, 2), 200.0, dtype=torch.float16))
    assert bool((total == 320000.0).all())  # float16 is refused


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "item_bytes", "rows"),
    [
        (16384, 128256, 2, 4096),
        (16384, 128256, 4, 2048),
        (65536, 128256, 2, 4096),
        (4096, 32000, 2, 1024),
        (100, 128256, 2, 100),
        (1000, 128256, 2, 256),
        (0, 10, 2, 1),
        (7, 0, 8, 7),
    ],
)
def test_chunks_hold_a_quarter_of_the_rows_and_no_more_than_a_gibibyte(
    tokens: int, vocabulary: int, item_bytes: int, rows: int
) -> None:
    assert chunk_rows(tokens, vocabulary, item_bytes) == rows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(7, 4)}, r"\[2, 5\], \[7, 4\] do not fit"),
        ({"weight": torch.zeros(7, 5, dtype=torch.bfloat16)}, "alike, not torch.float32 on cpu, torch.bfloat16"),
        ({"bias": torch.zeros(6)}, r"\[7, 5\], \[6\] do not fit"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels \[3\]"),
        ({"labels": torch.tensor([7, 0])}, "label 7 is none of 7"),
        ({"terms": Terms(cap=float("inf"))}, "cap inf"),
    ],
)
def test_bad_inputs_are_refused(change: dict[str, Any], words: str) -> None:
    given = {"hidden": torch.zeros(2, 5), "weight": torch.zeros(7, 5), "labels": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**(given | change))
