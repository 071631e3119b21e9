"""Networks and losses in tiles, and layers that keep attention: what they compute, what they keep, and in training."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _sequence_plans import sequence_plan
from _tensor_plans import FIVE, HALVES, ONE, QUARTERS, SHARED, STEPS, TIED, tensor_plan
from often import chosen
from torch import nn

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.model import ModelConfig
from partool_runtime.model import Decoder
from partool_runtime.model.loss import loss
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_loss, tile_networks
from partool_runtime.torch_internals.tensors import TorchDispatchMode

POLICIES = ("none", "attention", "selective", "keep_attention", "full")
VOCAB = 57
MODELS: dict[str, dict[str, Any]] = {
    "gated": {"kv_heads": 1},
    "plain": {"kv_heads": 5, "activation": "gelu", "ffn_bias": True, "norm": "layernorm", "tied_embeddings": True},
    "windows": {"kv_heads": 5, "window": 6, "layer_types": ("sliding", "full", "sliding"), "qk_norm": True},
}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def decoder(model: str, **fields: Any) -> Decoder:
    sizes = {"layers": 3, "hidden": 30, "ffn_hidden": 37, "heads": 5, "head_dim": 6, "vocab": VOCAB}
    torch.manual_seed(1)
    return Decoder(ModelConfig.model_validate(sizes | MODELS[model] | fields)).double()


def batch(length: int = 17, sequences: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(0, VOCAB, (sequences, length), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    return tokens, labels


def trained(model: nn.Module, length: int = 17) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients of two passes in a row, added up."""
    for sequences in (2, 1):
        total = model(*batch(length, sequences))
        total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], limit: float = 1e-12) -> None:
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        most = limit * max(1.0, float(expected.abs().max()))
        assert float((got[name] - expected).abs().max()) <= most, f"{name} differs"


class Operators(TorchDispatchMode):
    """Counts operators, and notes the largest tensor with a last dimension of some width."""

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.calls: dict[Any, int] = {}
        self.width, self.largest = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func] = self.calls.get(func, 0) + 1
        if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == self.width:
            self.largest = max(self.largest, out.numel() // self.width)
        return out


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_tiles_change_nothing(model: str, policy: str) -> None:
    """Odd sizes, and a last tile of two tokens."""
    assert_tiles_change_nothing(model, policy, 5)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", [1, 17])
def test_tiles_of_one_token_and_of_all_change_nothing(model: str, policy: str, tokens: int) -> None:
    assert_tiles_change_nothing(model, policy, tokens)


def assert_tiles_change_nothing(model: str, policy: str, tokens: int) -> None:
    plain, tiled = decoder(model), decoder(model)
    tile_networks(tiled.layers, tokens)
    tile_loss(tiled, tokens)
    recompute(tiled.layers, [policy] * 3, tiled=True)
    wanted, gradients = trained(plain)
    got, mine = trained(tiled)
    assert torch.allclose(got, wanted, rtol=1e-13)
    assert_same(mine, gradients)


@pytest.mark.parametrize("model", MODELS)
def test_keep_attention_changes_nothing(model: str) -> None:
    plain, kept = decoder(model), decoder(model)
    recompute(kept.layers, ["keep_attention"] * 3)
    assert_same(trained(kept)[1], trained(plain)[1])


def test_only_attention_is_not_computed_again() -> None:
    calls = {}
    for policy in ("none", "keep_attention", "full"):
        model = decoder("gated")
        recompute(model.layers, [policy] * 3)
        with Operators() as found:
            model(*batch()).backward()
        products = sum(count for operator, count in found.calls.items() if "mm" in str(operator))
        calls[policy] = found.calls[ATTENTION], products
    assert [calls[policy][0] for policy in ("none", "keep_attention", "full")] == [3, 3, 6]
    assert calls["none"][1] < calls["keep_attention"][1] == calls["full"][1]


def test_a_network_is_computed_twice_and_no_more() -> None:
    """Also where its layer is computed again: nobody reads the network's result then."""
    products = {}
    for policy in ("none", "full", "keep_attention"):
        model = decoder("gated")
        tile_networks(model.layers, 17 - 1)
        recompute(model.layers, [policy] * 3, tiled=True)
        with Operators(37) as found:
            model(*batch()).backward()
        products[policy] = found.calls[torch.ops.aten.silu.default]
    # Two tiles in each of three layers, forward and once more.
    assert products == dict.fromkeys(products, 2 * 3 * 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_wide_tensors_never_exist_whole(policy: str) -> None:
    largest = {}
    for tokens in (0, 4):
        model = decoder("gated")
        tile_networks(model.layers, tokens)
        tile_loss(model, tokens)
        recompute(model.layers, [policy] * 3, tiled=tokens > 0)
        for width in (37, VOCAB):
            with Operators(width) as found:
                model(*batch()).backward()
            largest[tokens, width] = found.largest
    assert largest[0, 37] == 2 * 17
    # Of weights, 30 rows, nothing else is as large.
    assert largest[4, 37] == largest[4, VOCAB] == 30
    assert largest[0, VOCAB] == 2 * 17


def test_gradients_of_weights_are_summed_wide() -> None:
    """In bf16, over 64 tiles: as near to the exact gradient as one product of all tokens, and not as a sum in bf16."""
    torch.manual_seed(3)
    x, grad = (torch.randn(1, 512, 30, dtype=torch.float64).bfloat16() for _ in range(2))
    far = {}
    for tokens in (0, 8):
        block = decoder("gated").bfloat16().layers[0]
        tile_networks([block], tokens)
        reference = decoder("gated").layers[0].ffn
        with torch.no_grad():
            for mine, theirs in zip(reference.parameters(), block.ffn.parameters(), strict=True):
                mine.copy_(theirs)
        block.ffn(x).backward(grad)
        reference(x.double()).backward(grad.double())
        far[tokens] = [
            float((mine.grad.double() - theirs.grad).norm() / theirs.grad.norm())
            for mine, theirs in zip(block.ffn.parameters(), reference.parameters(), strict=True)
        ]
    assert all(tiled < 1.5 * whole for tiled, whole in zip(far[8], far[0], strict=True)), far


def test_frozen_and_unused_weights() -> None:
    plain, tiled = decoder("plain"), decoder("plain")
    for model in (plain, tiled):
        model.layers[0].requires_grad_(False)
        model.embed.requires_grad_(False)
        model.layers[1].ffn.up.weight.requires_grad_(False)
    tile_networks(tiled.layers, 5)
    wanted = trained(plain)[1]
    assert_same(trained(tiled)[1], wanted)
    assert not any(name.startswith("layers.0.") for name in wanted)


def test_loss_of_some_tokens_at_once() -> None:
    hidden = torch.randn(2, 17, 30, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, 30, dtype=torch.float64, requires_grad=True)
    labels = batch()[1]
    wanted = torch.autograd.grad(whole := loss(hidden, weight, labels), (hidden, weight))
    for tile in (1, 5, 34, 100):
        got = torch.autograd.grad(total := loss(hidden, weight, labels, tile=tile), (hidden, weight))
        assert torch.allclose(total, whole, rtol=1e-13)
        assert_same(dict(zip("hw", got, strict=True)), dict(zip("hw", wanted, strict=True)))


TWO = Mesh(dp_shard=2)
CUT = Mesh(tp=2)
PIPED = Mesh(pp=2)
TILES = {"mlp_tile_tokens": 4, "loss_tile_tokens": 7}
Make = Any


def training_cases(make: Make) -> dict[str, tuple[Plan, str]]:
    """Return plans of two ranks, each with the model of the process that it must equal."""

    def case(model: str, mesh: Mesh, zero: int = 1, **fields: Any) -> tuple[Plan, str]:
        return make(model, mesh, settings={"zero": zero}, **fields), model

    return {
        "zero-0": case("five", TWO, 0, **TILES),
        "zero-2 full": case("tied", TWO, 2, recompute="full", **TILES),
        "zero-3 keep_attention": case("shared", TWO, 3, recompute="keep_attention", **TILES),
        "zero-3 apart": case("five", TWO, 3, gather="sequential", prefetch=2, persistent=40, **TILES),
        "tensor": case("shared", CUT, **TILES),
        "tensor overlapped": case("five", CUT, tensor_overlap="backward", tensor_chunks=2, recompute="full", **TILES),
        "tensor tied": case("tied", CUT, recompute="keep_attention", **TILES),
        "1f1b": case("tied", PIPED, 2, stages=HALVES, **TILES),
        "zb-h1": case("five", PIPED, schedule="zb-h1", stages=HALVES, recompute="keep_attention", **TILES),
        "zb-v": case("tied", PIPED, 3, schedule="zb-v", stages=QUARTERS, **TILES),
        "keep_attention": case("shared", TWO, 3, recompute="keep_attention"),
        "offloaded": case("five", TWO, 3, recompute="full", offload_activations="cpu", **TILES),
    }


MAKES: dict[str, dict[str, Any]] = {"five": FIVE, "tied": TIED, "shared": SHARED}


def make_plan(text: Path, model: str, mesh: Mesh, **fields: Any) -> Plan:
    return tensor_plan(text, mesh, model=MAKES[model], **fields)


CORE = ("zero-2 full", "zero-3 keep_attention", "tensor overlapped", "zb-h1", "offloaded")
"""Cases that together use everything once."""


def launch(pools: Pools, folder: Path, names: Collection[str]) -> Jobs:
    write_text(folder / "text")
    jobs, make = Jobs(folder, pools), partial(make_plan, folder / "text")
    cases = {name: case for name, case in training_cases(make).items() if name in names}
    for name, (plan, _) in cases.items():
        jobs.train(name, plan, run=f"case {name}")
    for model in sorted({model for _, model in cases.values()}):
        jobs.train(f"reference {model}", make(model, ONE), run=f"reference {model}")
    if "sequence" in names:
        shared = sequence_plan(folder / "text", Mesh(cp=2), recompute="keep_attention", **TILES)
        jobs.train("sequence", shared, run="case sequence")
        jobs.train("reference sequence", sequence_plan(folder / "text", ONE), run="reference sequence")
    return jobs


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return launch(pools, tmp_path_factory.mktemp("runs"), chosen(request, dict.fromkeys([*CORE, "sequence"])))


CASES = {name: model for name, (_, model) in training_cases(partial(make_plan, Path())).items()}


def assert_equal(ran: Jobs, name: str) -> None:
    model = CASES.get(name, "sequence")
    assert [ran.ended(name, rank) for rank in range(2)] == ["done", "done"]
    runs = f"reference {model}", f"case {name}"
    steps = 5 if name == "sequence" else STEPS
    wanted, got = (ran.state(run, step=steps) for run in runs)
    assert_same(got, wanted, 1e-10)
    for key in ("loss", "grad_norm"):
        expected, found = ([event[key] for event in ran.events(run, "step")] for run in runs)
        assert len(expected) == steps
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", [*CORE, "sequence"])
def test_training_in_tiles_equals_one_process(ran: Jobs, name: str) -> None:
    assert_equal(ran, name)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_combination_of_tiles_equals_one_process(pools: Pools, tmp_path: Path) -> None:
    ran = launch(pools, tmp_path, CASES)
    for name in CASES:
        assert_equal(ran, name)
