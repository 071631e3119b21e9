"""Grids of tokens: the tokens of each rank, the number of exchanges, and their bytes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from _expected_traffic import sent_by_stages

from partool.cost.sequence.dsp import sent
from partool.cost.sequence.types import AttentionSizes
from partool.cost.sequence.ulysses import sent as sent_by_ulysses
from partool.layout.grid import Axis, Turn, common, exchanges, tokens_by_rank, turns
from partool.layout.sequence import contiguous, index, shares, tokens
from partool.planner import make_plan
from partool.spec import load_text

GRIDS = [(5, 7), (7, 5), (4, 4), (9, 3)]
SPEC = """
model: {layers: 4, hidden: 64, heads: 4, vocab: 256, max_position: 960,
        attention: {grid: [24, 40], layer_types: {pattern: [row, column]}}}
hardware: {accelerator: h100-sxm, per_node: 4}
training: {sequence_length: 960, global_batch: 4}
data: python-stdlib
"""


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        (["row", "column"], [("row", None), ("column", None)]),
        (["column", "row"], [(None, None), ("row", "column")]),
        (["row", "row", "column", "row"], [("row", None), (None, None), ("column", None), ("row", "column")]),
        (["column", "column"], [(None, None)] * 2),
        ([], []),
    ],
)
def test_turns(axes: list[Axis], wanted: list[Turn]) -> None:
    assert list(turns(axes)) == wanted


@pytest.mark.parametrize("pattern", [["row", "column"], ["column", "row"]])
def test_pairs_of_layers_cost_two_exchanges(pattern: list[Axis]) -> None:
    for pairs in range(5):
        assert exchanges(pattern * pairs) == 2 * pairs
    assert exchanges(["row"] * 6) == 2
    assert exchanges(["column"] * 6) == 0


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3), (5, 4)])
def test_every_token_lies_on_one_rank_in_order(grid: tuple[int, int], ranks: int, tensor: int) -> None:
    rows, columns = (tokens_by_rank(grid, ranks, axis, tensor) for axis in ("row", "column"))
    for cut in (rows, columns):
        assert len(cut) == ranks * tensor
        assert sorted(place for spans in cut for place in index(spans)) == list(range(grid[0] * grid[1]))
        assert all(index(spans) == sorted(index(spans)) for spans in cut)
    for one, other in product(rows, columns):
        assert common(one, other) == common(other, one) == len(set(index(one)) & set(index(other)))
    if tensor == 1:
        assert columns == shares(grid[0] * grid[1], ranks, "grid", columns=grid[1])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_what_is_sent_is_what_others_hold_afterwards(grid: tuple[int, int], ranks: int, tensor: int) -> None:
    """Counted token by token, both ways; all ranks together send as much as they receive."""
    rows, columns = (
        [set(index(spans)) for spans in tokens_by_rank(grid, ranks, axis, tensor)] for axis in ("row", "column")
    )
    totals = []
    for rank in range(ranks * tensor):
        to_rows, to_columns = len(columns[rank] - rows[rank]), len(rows[rank] - columns[rank])
        found = sent(grid, ranks, rank, Turn("row", None), 3, tensor=tensor)
        assert found == (3 * to_rows, 3 * to_columns, 0, 0)
        assert sent(grid, ranks, rank, Turn("row", "column"), 3, tensor=tensor).forward == 3 * (to_rows + to_columns)
        assert sent(grid, ranks, rank, Turn(None, None), 3, tensor=tensor) == (0, 0, 0, 0)
        totals.append((to_rows, to_columns))
    given, returned = (sum(each) for each in zip(*totals, strict=True))
    assert given == returned


def test_a_quarter_of_what_ulysses_sends_in_both_axes() -> None:
    """Two exchanges of the hidden state per pair of layers; Ulysses exchanges four tensors in each of the two layers.

    Ulysses within one axis only, the other one local, sends half of that (arXiv 2403.10266, section 4).
    """
    ranks, grid, heads = 4, (8, 12), AttentionSizes(batch=1, queries=8, keys=8, key_dim=4, value_dim=4)
    hidden, length = heads.queries * heads.key_dim, grid[0] * grid[1]
    pair = sent_by_stages(grid, ranks, 1, [["row", "column"]], hidden)
    share = hidden * length // ranks
    assert pair.forward == pair.backward == 2 * share * (ranks - 1) // ranks
    one_layer = sent_by_ulysses(contiguous(length, ranks), heads, 1)
    assert (one_layer.forward, one_layer.backward) == (2 * pair.forward, 2 * pair.backward)
    assert tokens(tokens_by_rank(grid, ranks, "row")[1]) * hidden == share


def codes(text: str) -> set[str]:
    return {finding.code for finding in load_text(text).diagnostics}


def test_grids_and_layers_that_do_not_fit() -> None:
    assert codes(SPEC) == set()
    assert codes(SPEC.replace("grid: [24, 40], ", "")) == {"PT475"}
    assert codes(SPEC.replace(", layer_types: {pattern: [row, column]}", "")) == {"PT476"}
    assert codes(SPEC.replace("[24, 40]", "[24, 41]")) == {"PT477"}
    wanted = next(d for d in load_text(SPEC.replace("grid: [24, 40], ", "")).diagnostics if d.code == "PT475")
    assert "[32, 30]" in wanted.help


def test_a_plan_of_a_grid_model() -> None:
    """The planner chooses the method for both axes; the bytes of a step follow its formula."""
    spec = load_text(SPEC + "parallel: {sequence: 4}\n").spec
    assert spec is not None
    plan = make_plan(spec, base_dir=Path(), default_name="grid").plan
    assert plan is not None
    assert (plan.layout.sequence.method, plan.layout.sequence.order) == ("dsp", "grid")
    assert plan.model.grid == (24, 40)
    assert plan.shares == tokens_by_rank((24, 40), 4, "column")
    width = plan.layout.micro_batch * plan.layout.derived.accumulation * 64
    expected = max(sum(sent_by_stages((24, 40), 4, rank, [["row", "column"] * 2], width).bytes(2)) for rank in range(4))
    assert plan.prediction.time.traffic_bytes["sequence"] == expected > 0
    assert plan.prediction.time.terms_s["sequence_parallel"] > 0
