"""Layers of experts that the host does not wait for: compiled as one graph, and rows of fixed number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _routers import BASE

from partool.spec.model import ModelConfig, Moe
from partool_kernels.moe.op import route
from partool_runtime.model import Block
from partool_runtime.model.decoder import Context, Contexts
from partool_runtime.parallel.expert.load import LayerLoad, Scopes
from partool_runtime.parallel.expert.padded import rows_to_each, slots_of
from partool_runtime.parallel.expert.tokens import TokenShares
from partool_runtime.parallel.recompute import recompute

TOKENS = 5
ONE = Scopes(None, None, 1, TokenShares((tuple(range(TOKENS)),), 0))


def block_of(moe: Moe, policy: Any) -> tuple[Block, LayerLoad, Context]:
    """Return a block with experts, the load of its experts, and its context."""
    config = ModelConfig(**BASE, moe=moe)
    torch.manual_seed(1)
    block = Block(config, 0).double()
    load = LayerLoad(moe, ONE, torch.device("cpu"), torch.tensor(0.3, dtype=torch.float64))
    assert block.moe is not None
    block.moe.router.observer = load
    recompute([block], [policy])
    return block, load, Contexts(config)(torch.zeros(2, TOKENS, BASE["hidden"], dtype=torch.float64))


def passed(forward: Any, block: Block, load: LayerLoad, context: Context) -> list[torch.Tensor]:
    """Return results, gradients and counts of a training pass."""
    block.zero_grad()
    load.begin()
    torch.manual_seed(2)
    x_BSH = torch.randn(2, TOKENS, BASE["hidden"], dtype=torch.float64).requires_grad_()
    out_BSH = forward(x_BSH, context)
    out_BSH.square().sum().backward()
    grads = [p.grad for p in (x_BSH, *block.parameters()) if p.grad is not None]
    return [out_BSH.detach(), *grads, load.counts_E.double(), load.dropped.clone(), load.entropy.clone()]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does so,
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # and this, too
@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({"shared_experts": 1, "aux_loss": 0.1, "z_loss": 0.01}, "none"),
        ({"capacity": 0.5, "scores": "sigmoid", "bias_rate": 0.1}, "full"),
    ],
)
def test_layers_of_experts_are_compiled_as_one_graph(fields: dict[str, Any], policy: str) -> None:
    """The numbers of rows are read from the device by no one, and choices are counted once."""
    block, load, context = block_of(Moe(experts=6, top_k=3, ffn_hidden=7, **fields), policy)
    wanted = passed(block.forward, block, load, context)
    compiled = torch.compile(block.forward, backend="aot_eager_decomp_partition", fullgraph=True)
    try:
        got = passed(compiled, block, load, context)
    finally:
        torch.compiler.reset()
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert load.counts_E.sum() == 2 * TOKENS * 3
    assert bool(load.dropped > 0) == ("capacity" in fields)


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_each_choice_has_one_row_or_is_dropped(rows: int) -> None:
    torch.manual_seed(3)
    experts_TK = torch.stack([torch.randperm(6)[:2] for _ in range(15)])
    experts_TK[4, 1] = -1
    slots = slots_of(experts_TK, 6, 3, rows)
    places = route(experts_TK, 6).places
    for rank in range(3):
        mine = ((experts_TK // 2 == rank) & (experts_TK >= 0)).nonzero().tolist()
        in_order = sorted(mine, key=lambda at: int(places[at[0], at[1]]))
        for place, (token, choice) in enumerate(in_order):
            assert bool(slots.kept[token, choice]) == (place < rows)
            if place < rows:
                row = rank * rows + place
                assert slots.of_choices[token, choice] == row
                assert (slots.tokens[row], slots.experts[row]) == (token, experts_TK[token, choice] % 2)
    filled = slots.experts >= 0
    assert int(filled.sum()) == int(slots.kept.sum())
    assert not slots.kept[4, 1]


@pytest.mark.parametrize(
    ("choices", "tokens", "capacity", "rows"),
    [(24, (4, 4), 1.0, 12), (24, (4, 4), 1.3, 16), (24, (4, 4), 9.0, 24), (18, (4, 3), 1.0, 12), (24, (4, 3), 2.0, 24)],
)
def test_all_ranks_send_as_many_rows(choices: int, tokens: tuple[int, ...], capacity: float, rows: int) -> None:
    place = tokens.index(3) if choices == 18 else 0
    assert rows_to_each(choices, tokens, place, capacity) == rows
