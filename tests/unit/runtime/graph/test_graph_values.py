"""The graphs of ranks compute parts of what the model computes, values and gradients, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_graph import Attend, Layer, Model, causal, nothing
from torch import nn
from torch.nn import functional as F

from partool_runtime.graph.capture import CaptureError
from partool_runtime.graph.cut import cut
from partool_runtime.graph.share import Sharing, share
from partool_runtime.graph.tokenwise import check_tokenwise
from partool_runtime.usermodel.model import capture_module

WIDTH, HEADS = 12, 3
BOUNDS = (0, 3, 8, 12)
Mix = Callable[[Layer, torch.Tensor], torch.Tensor]


def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Stand in for attention without mixing tokens."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return v + 0.3 * q + 0.2 * k


def gradients(model: nn.Module, out: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    (out * weights).sum().backward()  # type: ignore[no-untyped-call]
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def compare(model: nn.Module, monkeypatch: pytest.MonkeyPatch, batch: int = 2) -> None:
    """Compare the outputs of three ranks, and the sums of their gradients, with the whole model's."""
    model = model.double().train()
    graph = capture_module(model, dtype=torch.float64, length=BOUNDS[-1], training=True, batch=batch)
    check_tokenwise(graph)
    length = BOUNDS[-1]
    tokens = torch.arange(batch * length).reshape(batch, length) % 11
    weights = torch.linspace(-1, 1, batch * length * 11, dtype=torch.float64).reshape(batch, length, 11)
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", local)
        expected = model(tokens)
    whole = gradients(model, expected, weights)
    sums: dict[str, torch.Tensor] = {}
    for first, stop in pairwise(BOUNDS):
        sharing = Sharing(
            batch, length, (first, stop), lambda node: (lambda heads, *_: local(*heads), False), model.get_submodule,
            torch.device("cpu"),
        )  # fmt: skip
        outer, parts = cut(share(graph, sharing).graph, model, ["layers.0", "layers.1"])
        for name, forward in parts.items():
            model.get_submodule(name).forward = forward  # type: ignore[method-assign]
        out = outer(tokens[:, first:stop], None, None)
        for name in parts:
            del model.get_submodule(name).forward
        assert torch.allclose(out, expected[:, first:stop], atol=1e-12), (first, stop)
        for name, gradient in gradients(model, out, weights[:, first:stop]).items():
            sums[name] = sums.get(name, torch.zeros_like(gradient)) + gradient
    assert sums.keys() == whole.keys()
    assert all(torch.allclose(sums[name], whole[name], atol=1e-10) for name in whole)


def without_gradients(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = layer.out(x)
    return x * gate


def filled(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(x.shape, dtype=x.dtype)
    made[..., :5] = x[..., :5]
    made[..., 5:] = x[..., 5:] * 2
    return made


def in_place(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    z = y
    z += 1
    F.relu(y, inplace=True)
    return y


def tokens_first(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    y = x.transpose(0, 1).reshape(-1, WIDTH)
    return y.view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1) * 2


KEPT: dict[str, Mix] = {
    "plain": nothing,
    "shape of a tensor": lambda layer, x: x.flatten().view(x.shape),
    "size of a tensor": lambda layer, x: x + torch.ones(x.size(), dtype=x.dtype),
    "numbers of the whole": lambda layer, x: x / x.shape[1] + x.numel() / 100,
    "no gradients": without_gradients,
    "where gradients are on": lambda layer, x: x * 2 if torch.is_grad_enabled() else x,
    "filled": filled,
    "in place": in_place,
    "tokens first": tokens_first,
    "merged": lambda layer, x: layer.out(x.view(-1, WIDTH)).view(*x.shape[:-1], -1),
    "branch of an odd length": lambda layer, x: x * 2 if x.shape[1] % 2 else x,
    "branch of a short length": lambda layer, x: x * 2 if x.shape[1] < 12 else x,
}
"""Code whose shares are parts of the whole."""


@pytest.mark.parametrize("name", KEPT)
def test_shares_are_parts_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Model(mix=KEPT[name]), monkeypatch)


def test_a_graph_of_one_sequence_takes_its_own_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Model(mix=lambda layer, x: x * 3 if x.shape[0] == 1 else x), monkeypatch, batch=1)


def permuted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = k.shape
    order = torch.tensor([2, 0, 1])
    k, v = (x[:, order, None].expand(batch, heads, 1, length, width).reshape(x.shape) for x in (k, v))
    return causal(q, k, v)


def test_heads_in_another_order_are_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Model(permuted), monkeypatch)


def reinterpreted(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + x.reshape(x.shape[0], WIDTH, -1).transpose(1, 2)


def other_order(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + x.transpose(0, 1).reshape(-1, WIDTH).view(x.shape)


def through_a_view(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(x.shape, dtype=x.dtype)
    made[..., 5:].add_(x[..., 5:])
    return made


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


REFUSED: dict[str, tuple[Attend, Mix, str]] = {
    "reinterpreted": (causal, reinterpreted, "takes tokens apart in another order"),
    "another order": (causal, other_order, "takes tokens apart in another order"),
    "branch of one length": (causal, lambda layer, x: x * 2 if x.shape[1] == WIDTH else x, "branches on sizes"),
    "fill": (causal, lambda layer, x: x * x.new_full((*x.shape[:2], 1), x.shape[1]), "fills a tensor"),
    "drawn": (causal, lambda layer, x: x * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) > 0.5), "random numbers"),
    "own backward": (causal, lambda layer, x: Through.apply(x), "backward pass of its own"),
    "through a view": (causal, through_a_view, "writes values of tokens"),
    "fewer rows": (
        causal,
        lambda layer, x: x.view(x.shape[0], -1, WIDTH // 2).gather(2, x.argsort(-1)),
        "takes some of the tokens",
    ),
}
"""Code that would compute something else on shares."""


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_code_that_shares_would_change_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, mix, why = REFUSED[name]
    with pytest.raises(CaptureError, match=why):
        compare(Model(attend, mix), monkeypatch)
