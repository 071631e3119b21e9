"""Tensor-parallel parts of the runtime that need no second rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from partool.layout.tensor import own_partition
from partool.spec.model import ModelConfig
from partool_runtime import deferral
from partool_runtime.errors import ConfigurationError
from partool_runtime.model import loss
from partool_runtime.model.projection import SEPARATE, Linear
from partool_runtime.parallel.tensor import columns as of_columns
from partool_runtime.parallel.tensor.apply import apply_tensor, placements
from partool_runtime.parallel.tensor.ops import Team, by_rank
from partool_runtime.parallel.tensor.symmetric import check_symmetric
from partool_runtime.parallel.tensor.sync import holder_sets
from partool_runtime.parallel.tensor.vocabulary import looked_up
from partool_runtime.weights import build

SIZES = {"layers": 2, "hidden": 12, "ffn_hidden": 11, "vocab": 31, "head_dim": 2}
SHARED = ModelConfig(**SIZES, heads=6, kv_heads=2, qk_norm=True)
FEW = ModelConfig(**SIZES, heads=3, kv_heads=3)


def test_placements_of_all_ranks_make_up_every_parameter() -> None:
    rows, whole = own_partition(SHARED, 4), build(SHARED).whole_shapes()
    seen = {name: torch.zeros(shape) for name, shape in whole.items()}
    for rank in range(4):
        for name, placement in placements(rows, whole, rank, 4).items():
            assert placement.shape == whole[name]
            for box in placement.boxes() if placement.counts else ():
                seen[name][tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))] += 1
    assert all(bool((times == 1).all()) for times in seen.values())


def test_placements_say_which_gradients_are_summed_over_whom() -> None:
    rows = own_partition(SHARED, 4)
    of_last = placements(rows, build(SHARED).whole_shapes(), 3, 4)
    # Each of the two key heads is on two ranks.
    assert of_last["layers.1.attention.k.weight"].shared_by == (2, 3)
    assert of_last["layers.0.attention.q_norm.weight"].shared_by == (0, 1, 2, 3)
    assert of_last["layers.0.ffn_norm.weight"].shared_by == ()
    assert not of_last["layers.0.ffn_norm.weight"].counts
    assert holder_sets(rows, 4) == [(0, 1), (0, 1, 2, 3), (2, 3)]


def test_ranks_without_heads_share_nothing() -> None:
    rows = own_partition(FEW, 4, sequence_norms=True)
    idle = placements(rows, ["layers.0.attention.k.weight", "final_norm.weight"], 3, 4)
    assert idle["layers.0.attention.k.weight"].local_shape == (0, 12)
    assert idle["layers.0.attention.k.weight"].shared_by == ()
    assert idle["final_norm.weight"].shared_by == (0, 1, 2, 3)
    assert holder_sets(rows, 4) == [(0, 1, 2, 3)]
    assert holder_sets(own_partition(FEW, 4), 4) == []


def test_a_parameter_that_no_row_is_about_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"extra\.weight"):
        placements(own_partition(FEW, 2), ["embed.weight", "extra.weight"], 0, 2)


def test_one_rank_leaves_the_model_as_it_is() -> None:
    model = build(FEW)
    before = [id(parameter) for parameter in model.parameters()]
    apply_tensor(model, SimpleNamespace(), SimpleNamespace(tp=SimpleNamespace(size=1)))
    assert [id(parameter) for parameter in model.parameters()] == before
    assert model.head is not None
    assert model.head.loss is loss
    assert model.layers[0].attention.inputs is SEPARATE


def test_rows_of_a_cut_vocabulary_add_up() -> None:
    weight_VH, tokens_BS = torch.randn(7, 3), torch.tensor([[0, 6, 3], [2, 5, 3]])
    parts = [looked_up(tokens_BS, weight_VH[first:stop], first) for first, stop in ((0, 3), (3, 6), (6, 7), (7, 7))]
    assert torch.equal(sum(parts), weight_VH[tokens_BS])


@pytest.mark.parametrize("padding", [0, 5, 6, None])
def test_the_padding_tokens_row_gets_no_gradient_on_any_rank(padding: int | None) -> None:
    weight_VH, tokens_BS = torch.randn(7, 3, requires_grad=True), torch.tensor([[0, 6, 3], [5, 0, 6]])
    expected = torch.nn.functional.embedding(tokens_BS, weight_VH, padding)
    (gradient_VH,) = torch.autograd.grad(expected.square().sum(), weight_VH)
    cuts = ((0, 3), (3, 6), (6, 7), (7, 7))
    found = sum(looked_up(tokens_BS, weight_VH[first:stop], first, padding) for first, stop in cuts)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.square().sum(), weight_VH)[0], gradient_VH)


def test_a_rank_without_tokens_of_the_vocabulary_has_a_graph_all_the_same() -> None:
    weight_VH = torch.zeros(0, 3, requires_grad=True)
    looked_up(torch.tensor([[4]]), weight_VH, 7).sum().backward()
    assert weight_VH.grad is not None


def test_tokens_by_rank_are_filled_with_zeros() -> None:
    team = Team("unused", 0, 4, length=5)
    by_rank_B4sH = by_rank(torch.ones(2, 5, 3), team)
    assert by_rank_B4sH.shape == (2, 4, 2, 3)
    assert by_rank_B4sH.sum((0, 2, 3)).tolist() == [12, 12, 6, 0]


@pytest.mark.parametrize(
    ("length", "device", "reason"),
    [(8, "cpu", "CUDA"), (None, "cuda", "sequence_norms"), (7, "cuda", "evenly")],
)
def test_fused_exchanges_say_what_they_lack(length: int | None, device: str, reason: str) -> None:
    team = Team("unused", 0, 2, length=length, symmetric=True)
    with pytest.raises(ConfigurationError, match=f"PT647.*{reason}"):
        check_symmetric(team, torch.device(device))
    check_symmetric(Team("unused", 0, 2, length=8), torch.device("cuda"), own_partition(FEW, 2))


def test_fused_exchanges_are_refused_on_rocm_as_by_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with pytest.raises(ConfigurationError, match=r"PT647.*not rocm"):
        check_symmetric(Team("unused", 0, 2, length=8), torch.device("cuda"), own_partition(FEW, 2))


def test_fused_exchanges_are_for_ranks_that_all_hold_something() -> None:
    with pytest.raises(ConfigurationError, match=r"PT647.*attention\.q"):
        check_symmetric(Team("unused", 0, 4, length=8), torch.device("cuda"), own_partition(FEW, 4))


@pytest.mark.parametrize(
    ("overlap", "order"),
    [(True, ["start", "weight", "weight", "finish"]), (False, ["start", "finish", "weight", "weight"])],
)
def test_the_inputs_gradient_travels_while_the_weights_are_computed(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, order: list[str]
) -> None:
    seen: list[str] = []
    of_weight = deferral.of_weight

    def noted(what: str, value: torch.Tensor) -> torch.Tensor:
        seen.append(what)
        return value

    monkeypatch.setattr(of_columns, "start_tokens", lambda x, team: x)
    monkeypatch.setattr(of_columns, "tokens", lambda x, team: x)
    monkeypatch.setattr(of_columns, "start_reduce_from_tp", lambda x, team, fresh: noted("start", x))
    monkeypatch.setattr(of_columns, "finished", lambda x: noted("finish", x))
    monkeypatch.setattr(deferral, "of_weight", lambda x, grad: noted("weight", of_weight(x, grad)))
    x_BSH = torch.randn(2, 4, 3, requires_grad=True)
    linears = [Linear(3, 5), Linear(3, 2)]
    outputs = of_columns.columns(x_BSH, linears, Team("unused", 0, 1, length=4, overlap=overlap))
    sum(output.sum() for output in outputs).backward()
    assert seen == order
