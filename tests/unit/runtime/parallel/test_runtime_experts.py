"""Routers and layers of experts against loops over tokens, and against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _routers import BASE, observed
from torch.nn import functional as F

from partool.layout.parameters import parameters
from partool.spec.experts import Moe
from partool.spec.model import ModelConfig
from partool_runtime.model import Decoder
from partool_runtime.model.moe import MixtureOfExperts
from partool_runtime.model.routing import Router, choose
from partool_runtime.parallel.expert.load import ExpertLoads, LayerLoad, Scopes
from partool_runtime.parallel.expert.tokens import TokenShares


def config(**moe: Any) -> ModelConfig:
    fields = {"experts": 6, "top_k": 3, "ffn_hidden": 7} | moe
    return ModelConfig(**BASE, moe=Moe(**fields))


def layer_of(model: ModelConfig) -> MixtureOfExperts:
    torch.manual_seed(1)
    layer = MixtureOfExperts(model).double()
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def by_hand(layer: MixtureOfExperts, x_TH: torch.Tensor, moe: Moe) -> torch.Tensor:
    """Return the layer's results token by token, by the equations of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""
    router, experts = layer.router, layer.experts
    up, down = (each.weight.view(moe.experts, -1, each.weight.shape[1]) for each in (experts.up, experts.down))
    gate = experts.gate.weight.view(moe.experts, -1, x_TH.shape[1])
    rows = []
    for x_H in x_TH:
        logits = router.weight @ x_H
        scores = logits.softmax(0) if moe.scores == "softmax" else logits.sigmoid()
        biased = (scores if router.bias is None else scores + router.bias).tolist()
        size = moe.experts // moe.groups
        members = [range(at, at + size) for at in range(0, moe.experts, size)]
        best = 1 if moe.group_score == "max" else 2
        of_groups = sorted(members, key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:best]))
        allowed = [e for group in of_groups[: moe.top_groups if moe.groups > 1 else 1] for e in group]
        chosen = sorted(allowed, key=lambda e: -biased[e])[: moe.top_k]
        weights = torch.stack([scores[e] for e in chosen])
        if moe.normalise:
            weights = weights / weights.sum()
        each = [down[e] @ (F.silu(gate[e] @ x_H) * (up[e] @ x_H)) for e in chosen]
        rows.append(sum(w * moe.scaling_factor * y for w, y in zip(weights, each, strict=True)))
    out = torch.stack(rows)
    if layer.coefficients is not None:
        assert layer.shared is not None
        pairs = [(layer.coefficients.weight @ x_H + layer.coefficients.bias).exp() for x_H in x_TH]
        return torch.stack(
            [
                (first * y + second * z) / (first + second)
                for (first, second), y, z in zip(pairs, out, layer.shared(x_TH), strict=True)
            ]
        )
    return out if layer.shared is None else out + layer.shared(x_TH)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalise": False, "scaling_factor": 2.5, "shared_experts": 2},
        {"scores": "sigmoid", "bias_rate": 0.1, "groups": 3, "top_groups": 2, "scaling_factor": 1.5},
        {"groups": 2, "top_groups": 1, "group_score": "max", "normalise": False},
        {"top_k": 1, "shared_experts": 1},
        {"shared_experts": 2, "residual": True},
        {"top_k": 6},
    ],
)
def test_layers_equal_loops_over_tokens(fields: dict[str, Any]) -> None:
    model = config(**fields)
    layer, x_BSH = layer_of(model), torch.randn(2, 5, 10, dtype=torch.float64)
    assert model.moe is not None
    wanted = by_hand(layer, x_BSH.flatten(0, 1), model.moe).view_as(x_BSH)
    torch.testing.assert_close(layer(x_BSH), wanted, rtol=1e-12, atol=1e-12)
    trained = [p for p in layer.parameters() if p.requires_grad]
    got, expected = (torch.autograd.grad(out.square().sum(), trained) for out in (layer(x_BSH), wanted))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_biases_select_and_never_weigh() -> None:
    router = Router(config(scores="sigmoid", bias_rate=0.1)).double()
    x_TH = torch.randn(9, 10, dtype=torch.float64)
    assert router.bias is not None
    router.bias.data[4] = 100.0
    choices = router(x_TH, 1)
    assert (choices.experts[:, 0] == 4).all()
    scores = (x_TH @ router.weight.T).sigmoid().gather(1, choices.experts)
    torch.testing.assert_close(choices.weights, scores / scores.sum(1, keepdim=True))
    choices.weights.square().sum().backward()
    assert router.bias.grad is None


def test_balanced_choices_take_experts_in_turn() -> None:
    moe = Moe(experts=4, top_k=2, ffn_hidden=3, routing="balanced")
    assert choose(torch.randn(6, 4), None, moe).flatten().bincount().tolist() == [3, 3, 3, 3]


def test_no_tokens_and_unused_experts_have_zero_gradients() -> None:
    layer = layer_of(config(top_k=1))
    layer(torch.zeros(1, 0, 10, dtype=torch.float64)).sum().backward()
    assert all(float(p.grad.abs().max()) == 0 for p in layer.parameters() if p.requires_grad and p.grad is not None)
    assert layer.experts.up.weight.grad is not None


def test_names_and_shapes_are_those_of_the_list() -> None:
    model = config(bias_rate=0.0, first_dense_layers=1, shared_experts=2)
    built = {name: tuple(p.shape) for name, p in Decoder(model).named_parameters()}
    assert built == {info.name: info.shape for info in parameters(model)}


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", ["micro_batch", "sequence"])
def test_losses_are_those_of_the_equations(scores: Any, scope: Any) -> None:
    torch.manual_seed(2)
    moe = Moe(experts=6, top_k=2, ffn_hidden=7, scores=scores, aux_loss=0.3, aux_scope=scope, z_loss=0.2)
    router, _ = observed(moe, 12)
    x_BSH = torch.randn(3, 4, 10, dtype=torch.float64)
    choices = router(x_BSH.flatten(0, 1), 3)
    (got,) = torch.autograd.grad((choices.weights * 0).sum(), [router.weight])

    logits_BSE = x_BSH @ router.weight.T
    shares_BSE = logits_BSE.softmax(-1) if scores == "softmax" else logits_BSE.sigmoid()
    shares_BSE = shares_BSE / shares_BSE.sum(-1, keepdim=True)
    chosen_BSE = F.one_hot(choices.experts, 6).sum(1).view(3, 4, 6).double()
    parts = zip(shares_BSE, chosen_BSE, strict=True) if scope == "sequence" else [(shares_BSE, chosen_BSE)]
    losses = [6 * (share.flatten(0, -2).mean(0) * chosen.flatten(0, -2).mean(0) / 2).sum() for share, chosen in parts]
    wanted = 0.3 * torch.stack(losses).mean() + 0.2 * logits_BSE.logsumexp(-1).square().mean()
    torch.testing.assert_close(got, torch.autograd.grad(wanted, [router.weight])[0], rtol=1e-12, atol=1e-12)


def test_the_loss_is_one_where_the_load_is_even() -> None:
    moe = Moe(experts=4, top_k=2, ffn_hidden=7, aux_loss=1.0, routing="balanced")
    _, load = observed(moe, 6)
    _, factors_BE = load.counted(choose(torch.ones(6, 4), None, moe), torch.full((6, 4), 0.25), 1)
    assert factors_BE is not None
    assert (factors_BE * 0.25).sum().item() == pytest.approx(1.0)


def test_choices_beyond_the_capacity_are_dropped_in_the_order_of_tokens() -> None:
    moe = Moe(experts=3, top_k=1, ffn_hidden=7, capacity=1.0)
    _, load = observed(moe, 6)
    experts_TK = torch.tensor([[0], [0], [1], [0], [2], [0]])
    assert load.kept(experts_TK, 2).flatten().tolist() == [0, 0, 1, -1, 2, -1]
    assert load.dropped.item() == 2
    with torch.no_grad():
        load.kept(experts_TK, 2)
    assert load.dropped.item() == 2, "evaluations are not counted"


def test_biases_follow_the_load_unless_a_step_is_skipped_or_they_are_frozen() -> None:
    moe = Moe(experts=3, top_k=1, ffn_hidden=7, bias_rate=0.5)
    model = ModelConfig(**BASE, moe=moe)
    for updated, frozen, wanted in (
        (True, (), [-0.5, 0.0, 0.5]),
        (False, (), [0.0] * 3),
        (True, ("*.router.*",), [0.0] * 3),
    ):
        layer = MixtureOfExperts(model)
        load = LayerLoad(moe, Scopes(None, None, 1, TokenShares(((0,),), 0)), torch.device("cpu"), torch.zeros(()))
        loads = ExpertLoads([(1, layer, load)], Scopes(None, None, 1, TokenShares(((0,),), 0)), torch.zeros(()), frozen)
        load.add(torch.tensor([[5, 3, 1]]), torch.full((9, 3), 1.0, dtype=torch.float64))
        loads.end(updated=updated)
        assert layer.router.bias is not None
        assert layer.router.bias.tolist() == wanted
        (report,) = loads.reports()
        assert (report.tokens, report.dropped) == ([5, 3, 1], 0.0)
        assert report.imbalance == pytest.approx(5 / 3)
        assert report.entropy == pytest.approx(math.log(3))


def test_a_rank_without_tokens_takes_none_of_those_of_whole_sequences() -> None:
    shares = TokenShares(((0, 1), (2,), ()), rank=2)
    whole = torch.arange(6.0).view(1, 3, 2)
    assert shares.mine(whole).shape == (1, 0, 2)
    padded = [
        shares.__class__(shares.places, rank).padded(whole[:, list(held)]) for rank, held in enumerate(shares.places)
    ]
    assert torch.equal(shares.joined(torch.stack(padded)), whole)
