"""Graphs of forward passes: what is captured, what is refused, and how ranks' graphs look; no processes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from partool_runtime.graph.attention import AttentionNode
from partool_runtime.graph.capture import Captured, CaptureError
from partool_runtime.graph.cut import cut
from partool_runtime.graph.masks import rule_of
from partool_runtime.graph.nodes import token_dims, value_of
from partool_runtime.graph.share import Shared, Sharing, share
from partool_runtime.graph.tokenwise import check_tokenwise
from partool_runtime.usermodel.model import capture_module

WIDTH, HEADS, VOCAB, LENGTH = 12, 3, 11, 13
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Mix = Callable[["Layer", torch.Tensor], torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def nothing(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x


class Layer(nn.Module):
    def __init__(self, attend: Attend, mix: Mix) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.attend, self.mix = attend, mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        x = self.mix(self, x)
        heads = (self.q(x), *self.kv(x).chunk(2, dim=-1))
        q, k, v = (each.view(batch, length, HEADS, -1).transpose(1, 2) for each in heads)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH))


class Model(nn.Module):
    """Two layers; ``attend`` and ``mix`` are the parts that tests change."""

    def __init__(self, attend: Attend = causal, mix: Mix = nothing, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.at = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(attend, mix) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.at(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def captured(model: nn.Module, length: int = LENGTH) -> Captured:
    return capture_module(model, dtype=torch.float32, length=length, training=False)


def as_values(heads: tuple[torch.Tensor, ...], *_: Any) -> torch.Tensor:
    return heads[2] + heads[0].mean() + heads[1].mean()


def shared(
    model: nn.Module, span: tuple[int, int] = (0, 5), whole: Captured | None = None
) -> tuple[Shared, list[AttentionNode]]:
    """Return a rank's graph, made from the ``whole`` one, and its attention."""
    found: list[AttentionNode] = []

    def replace(node: AttentionNode) -> tuple[Any, bool]:
        found.append(node)
        return as_values, False

    sharing = Sharing(2, LENGTH, span, replace, model.get_submodule, torch.device("cpu"))
    return share(captured(model) if whole is None else whole, sharing), found


def looked_at(model: nn.Module, length: int = LENGTH) -> None:
    whole = captured(model, length)
    check_tokenwise(whole)
    shared(model, whole=whole)


def attends(make: Callable[[torch.Tensor], torch.Tensor]) -> Attend:
    """Return attention whose mask is made from the distances of queries and keys."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        at = torch.arange(q.shape[2], device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(at[:, None] - at[None, :]))

    return attend


def test_a_graph_of_a_share_has_the_ranks_tokens_and_no_pairs_of_tokens() -> None:
    window = attends(lambda distance: (distance >= 0) & (distance < 3))
    for attend in (causal, window):
        model = Model(attend)
        whole = captured(model)
        for first, stop in ((0, 5), (5, 9), (9, 13)):
            graph, nodes = shared(model, (first, stop), whole)
            assert len(nodes) == len(graph.attention) == 2
            assert [len(graph.within(f"layers.{n}")) for n in (0, 1)] == [1, 1]
            targets = [str(node.target) for node in graph.graph.nodes]
            assert targets.count("narrow") == 1, "the embeddings of positions, once for all layers"
            assert not [t for t in targets if "scaled_dot_product" in t]
            pairs = [node for node in graph.graph.nodes if len(token_dims(value_of(node), whole.length)) > 1]
            assert not pairs, "masks that follow a rule are not made"
            outer, parts = cut(graph.graph, model, ["layers.0", "layers.1"])
            for name, forward in parts.items():
                model.get_submodule(name).forward = forward  # type: ignore[method-assign]
            tokens = torch.zeros(2, stop - first, dtype=torch.long)
            out = outer(tokens, None, None)
            assert out.shape == (2, stop - first, VOCAB)
            # Values instead of attention: what a rank computes is its part of the whole.
            assert torch.allclose(out[0, 0], out[1, 0])
            for name in parts:
                del model.get_submodule(name).forward


def test_parts_read_parameters_when_they_are_called() -> None:
    model = Model()
    graph, _ = shared(model, (0, LENGTH))
    outer, parts = cut(graph.graph, model, ["layers.0", "layers.1"])
    for name, forward in parts.items():
        model.get_submodule(name).forward = forward  # type: ignore[method-assign]
    tokens = torch.arange(LENGTH)[None] % VOCAB
    before = outer(tokens, None, None)
    first = model.layers[0]
    assert isinstance(first, Layer)
    first.out.weight = nn.Parameter(torch.zeros_like(first.out.weight))
    assert not torch.allclose(before, outer(tokens, None, None))


def shifted(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + F.pad(x[:, :-1], (0, 0, 1, 0))


def branched(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def half(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + x[:, : x.shape[1] // 2].sum()


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT).softmax(-1) @ v


def of_one_length(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(1, 11, 1)


def written_into_positions(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[None, :, None].repeat(x.shape[0], 1, WIDTH)
    return at.add_(x)


OUTSIDE = torch.ones(WIDTH)
REFUSED: dict[str, tuple[Attend, Mix, str]] = {
    "shift": (causal, shifted, "tokens"),
    "cumsum": (causal, lambda layer, x: x.cumsum(1), "cumsum works along the tokens"),
    "mean": (causal, lambda layer, x: x - x.mean(1, keepdim=True), "mean works along the tokens"),
    "everything": (causal, lambda layer, x: x / x.abs().max(), "max works along the tokens"),
    "softmax": (causal, lambda layer, x: x.softmax(-2), "_softmax works along the tokens"),
    "flip": (causal, lambda layer, x: x.flip(1), "flip works along the tokens"),
    "roll": (causal, lambda layer, x: x.roll(1, 1), "roll works along the tokens"),
    "convolution": (causal, lambda layer, x: layer.conv(x.mT).mT, "does not know whether convolution keeps"),
    "norm": (causal, lambda layer, x: F.layer_norm(x.mT, (11,)).mT, "one length"),
    "products": (causal, lambda layer, x: x + (x.mT @ x).sum(), "bmm sums over tokens"),
    "some": (causal, half, "tokens"),
    "branch": (causal, branched, "[Dd]ata-dependent"),
    "break": (causal, lambda layer, x: print(x) or x, "print|graph break|Unsupported"),  # type: ignore[func-returns-value]
    "written out": (written_out, nothing, "pairs of tokens"),
    "length": (causal, of_one_length, "one length"),
    "tensor": (causal, lambda layer, x: x * OUTSIDE, "neither a parameter nor a buffer"),
    "positions": (causal, written_into_positions, "writes values of tokens"),
    "no attention": (lambda q, k, v: v, nothing, "no attention that partool knows"),
}
"""Models that mix tokens outside of attention, or whose code is more than a graph, and what is said of them."""


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_shared_are_refused(name: str) -> None:
    attend, mix, why = REFUSED[name]
    with pytest.raises(CaptureError, match=why) as raised:
        looked_at(Model(attend, mix), length=11)
    if name in ("cumsum", "mean", "branch", "written out"):
        assert "test_graph.py" in str(raised.value), "the message names the line"


def test_a_graph_is_of_the_branch_of_its_length() -> None:
    def mix(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] >= LENGTH else x

    model = Model(mix=mix)
    for length, factors in ((LENGTH, 2), (LENGTH - 1, 0)):
        whole = captured(model, length)
        assert sum(node.target is operator.mul for node in whole.graph.nodes) == factors
        assert (whole.wrong_guard(2, LENGTH) == "") == (length == LENGTH)
        if length != LENGTH:
            with pytest.raises(CaptureError, match="branches on sizes"):
                shared(model, whole=whole)


def test_code_that_keeps_tokens_apart_is_accepted() -> None:
    def mix(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        best, places = x.topk(3, dim=-1)
        x = x.scatter(-1, places, best * 2) + F.normalize(x, dim=-1) + x.cumsum(-1)
        first, second = x.split([5, 7], dim=-1)
        x = torch.cat([second, first.flip(-1)[..., :5]], dim=-1)
        return F.layer_norm(x, (WIDTH,)) + F.rms_norm(x, (WIDTH,)) + x.logsumexp(-1, keepdim=True)

    model = Model(mix=mix)
    whole = captured(model)
    check_tokenwise(whole)
    assert len(shared(model, whole=whole)[0].attention) == 2


RULES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int | str | None]] = {
    "causal": (lambda d: d >= 0, None),
    "window": (lambda d: (d >= 0) & (d < 4), 4),
    "window of another form": (lambda d: (d >= 0) & ~(d > 5), 6),
    "long window": (lambda d: (d >= 0) & (d < 300), 300),
    "added": (lambda d: torch.where(d >= 0, 0.0, -torch.inf), None),
    "added minimum": (lambda d: torch.where((d >= 0) & (d < 3), 0.0, torch.finfo(torch.float32).min), 3),
    "both ways": (lambda d: d.abs() < 4, "not causal"),
    "later": (lambda d: d <= 0, "not causal"),
    "gap": (lambda d: (d >= 0) & (d != 2), "not causal"),
    "slope": (lambda d: torch.where(d >= 0, -0.5 * d, -torch.inf), "no mask of zeros|mul makes it"),
    "growing": (lambda d: (d >= 0) & (d < (d.shape[-1] + 1) // 2), "window|not causal"),
    "very long window": (lambda d: (d >= 0) & (d <= 40_000), 40_001),
    "longer than the sequence": (lambda d: (d >= 0) & (d < 100_000), None),
    "window of two integers": (lambda d: (d >= 0) & (d + 5_000 < 9_000), "none of the integers"),
    "difference of two integers": (lambda d: (d >= 0) & (d + 4_000 < 5_000), "none of the integers"),
    "two windows": (lambda d: (d >= 0) & (d < 9_000) & (d < 20_000), 9_000),
    "gap far away": (lambda d: (d >= 0) & (d < 20_000) & (d != 9_000), "not causal"),
}
"""Masks from distances of queries and keys, and the window that partool finds in them, or what it says."""


@pytest.mark.parametrize("name", RULES)
def test_masks_are_recognised(name: str) -> None:
    make, expected = RULES[name]
    model = Model(attends(make), layers=1)
    graph = captured(model)
    (node,) = shared(model, whole=graph)[1]
    assert node.mask is not None
    found = rule_of(node.mask, graph, {}, 100_000)
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert any(part in found for part in expected.split("|")), found
    else:
        assert found == expected


def test_a_window_longer_than_the_sequence_is_none() -> None:
    model = Model(attends(lambda d: (d >= 0) & (d < 300)), layers=1)
    graph = captured(model)
    (node,) = shared(model, whole=graph)[1]
    assert node.mask is not None
    assert rule_of(node.mask, graph, {}, 200) is None


def test_repeated_heads_are_sent_once() -> None:
    def interleaved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x[:, :1].repeat_interleave(HEADS, dim=1) for x in (k, v))
        return causal(q, k, v)

    def expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, _, length, width = k.shape
        few = (x[:, :1][:, :, None].expand(batch, 1, HEADS, length, width) for x in (k, v))
        k, v = (x.reshape(batch, HEADS, length, width) for x in few)
        return causal(q, k, v)

    def of_values_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal(q, k, v[:, :1].repeat_interleave(HEADS, dim=1))

    for attend, keys in ((interleaved, 1), (expanded, 1), (of_values_alone, HEADS), (causal, HEADS)):
        (node,) = shared(Model(attend, layers=1))[1]
        assert [value_of(each).shape[1] for each in node.heads] == [HEADS, keys, keys], attend


def test_a_mask_of_the_tokens_themselves_is_refused() -> None:
    class Padded(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen = (tokens != 0)[:, None, None, :]
            heads = self.embed(tokens).view(*tokens.shape, HEADS, -1).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen).transpose(1, 2).flatten(2)

    with pytest.raises(CaptureError, match="mask that depends on tokens"):
        shared(Padded())


def test_a_layer_that_is_called_twice_or_never_is_refused() -> None:
    class Twice(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for number in (0, 1, 0):
                x = self.layers[number](x)
            return self.head(x)

    class Never(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[0](self.embed(tokens)))

    for kind, why in ((Twice, "mixes the computation"), (Never, r"does not call layers\.1")):
        with pytest.raises(CaptureError, match=why):
            cut(shared(kind())[0].graph, kind(), ["layers.0", "layers.1"])
