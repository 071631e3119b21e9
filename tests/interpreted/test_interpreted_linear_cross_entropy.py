"""Output matrix and cross entropy in chunks, with kernels in Triton's interpreter: errors and peak memory."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partool_kernels.cases import BACKWARD, excess
from partool_kernels.cross_entropy import op
from partool_kernels.cross_entropy.op import IGNORED, Terms, scaled
from partool_kernels.linear_cross_entropy.chunks import How, Inputs, WantedGradients, losses_and_gradients
from partool_kernels.linear_cross_entropy.op import linear_cross_entropy
from partool_kernels.registry import Config

TERMS = Terms(1e-2, 5.0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a small block, so that the interpreter computes few masked columns."""
    config = Config((("BLOCK", 128),), num_warps=4, num_stages=1)
    monkeypatch.setattr(op, "_choice", lambda *arguments: config)


def random(dtype: torch.dtype, tokens: int = 12, vocabulary: int = 37, hidden: int = 6) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    sizes = ((tokens, hidden), (vocabulary, hidden), (vocabulary,))
    found = [torch.randn(*size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[1::4] = IGNORED
    return found[0], found[1], labels, found[2]


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = TERMS.cap * torch.tanh((logits if logits.dtype == torch.float64 else logits.float()) / TERMS.cap)
    z = logits.logsumexp(-1).square()[labels != IGNORED].sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") + TERMS.z_loss * z


def fused(
    rows: int, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, labels, bias=bias, terms=TERMS, rows=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [2, 5, 12])
def test_losses_and_gradients_are_as_exact_as_those_of_torch(dtype: torch.dtype, rows: int) -> None:
    low = random(dtype)
    exact = tuple(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in low)
    results = []
    for function, inputs in ((partial(fused, rows), low), (plain, low), (plain, exact)):
        loss = function(*inputs)
        results.append([loss.detach(), *torch.autograd.grad(loss * 0.3, [x for x in inputs if x.requires_grad])])
    for ours, eager, true in zip(*results, strict=True):
        assert excess(ours, eager, true, BACKWARD) <= 1


class Live(TorchDispatchMode):
    """Records the peak bytes of tensors created inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor):
                self._note(made.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def test_at_most_a_tenth_of_the_memory_of_all_logits_is_held() -> None:
    """Counted tensor by tensor over forward and backward pass, without the weight's gradient; against eager torch.

    The operator's inner function is called directly: a dispatch mode sees only an operator's results.
    """
    tokens, vocabulary = 40, 256
    hidden, weight, labels, _ = random(torch.float32, tokens, vocabulary, 4)
    inputs = Inputs(hidden.detach(), weight.detach(), None, labels)
    with Live() as ours:
        # An eighth of the rows per chunk, as at real sizes.
        found = losses_and_gradients(inputs, How(rows=tokens // 8), WantedGradients(True, True, False))
        assert found.hidden is not None
        gradient = scaled(found.hidden, torch.tensor(0.5), torch.float32)
    with Live() as eager:
        total = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
        (total * 0.5).backward()
    assert hidden.grad is not None
    torch.testing.assert_close(gradient, hidden.grad)
    logits = tokens * vocabulary * 4
    assert eager.most - weight.nbytes >= 2 * logits
    assert logits / 8 < ours.most - weight.nbytes <= 0.1 * (eager.most - weight.nbytes)
