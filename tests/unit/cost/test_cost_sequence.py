"""The cost of sequence parallelism: its methods' traffic, overlap and memory per rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import new_layout

from partool.cost import collective
from partool.cost.case import ATTENTION, INSIDES, RECOMPUTE, SEQUENCE_METHODS, Layouts
from partool.cost.codec import encode
from partool.cost.kinds import Kind, kinds
from partool.cost.memory.sequence import buffer_bytes, saved_bytes
from partool.cost.sequence.price import exchange
from partool.cost.sequence.types import BLOCK_OPERATORS, ExchangeTime, SequenceTeams
from partool.cost.time.attention import attention_s, pairs
from partool.cost.time.layer import layer
from partool.cost.traffic.sequence import heads_of, sent_by_rank
from partool.cost.training.bound import bound_s
from partool.cost.training.communicators import communicators
from partool.cost.training.peak import peak_memory
from partool.cost.training.predict import predict_time
from partool.cost.training.traffic import traffic_bytes
from partool.plan.layout import Layout, Mesh
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.strategies.sequence import METHODS, ON_GRIDS
from partool.work.training import TrainingWork

ULYSSES, RING_OF_KEYS, USP, STARTRAIL, ALL_GATHER, DSP = map(
    SEQUENCE_METHODS.index, ("ulysses", "ring", "usp", "startrail", "all_gather", "dsp")
)
FULL = Kind(None, False)
MODEL = ModelConfig(
    layers=4, hidden=4096, ffn_hidden=14336, heads=32, kv_heads=8, head_dim=128, vocab=32000, max_position=131072
)
GPU = Devices(
    accelerator="test", backend="cuda", nodes=4, per_node=8, memory_bytes=80 * 2**30, peak_flops=1e15,
    achievable_flops=8e14, units=132, memory_bytes_per_s=3e12, link_bytes_per_s=4e11, fabric_bytes_per_s=5e10,
)  # fmt: skip
ONE_LINK = GPU.model_copy(update={"per_node": 4096, "nodes": 1, "link_bytes_per_s": 1 / 0.78, "link_latency_s": 0.0})
"""Machine of one node, without latency, where a byte takes one second."""
POLICY = RECOMPUTE.index("full")
WINDOW = Kind(4096, False)


def job(model: ModelConfig = MODEL, length: int = 32768, devices: Devices = GPU, **changes: Any) -> TrainingWork:
    return TrainingWork(model, devices, length, "bf16", global_batch=64, **changes)


def sent(one: TrainingWork, kind: Kind = FULL, *, backward: bool = False, **columns: Any) -> ExchangeTime:
    return exchange(one, Layouts(**columns), kind, backward=backward)


def busy(one: TrainingWork, kind: Kind = FULL, **columns: Any) -> float:
    return float(attention_s(one, Layouts(**columns), kind, backward=False))


# Seconds.


def test_one_rank_sends_nothing() -> None:
    for method in range(6):
        assert sent(job(), sequence_method=method).total == 0.0


def test_ulysses_trades_heads_for_tokens() -> None:
    rows = 32768 / 8
    elements = rows * (4096 + 1024 + 1024 + 4096) * 7 / 8
    start = float(4 * collective.all_to_all_s(job(), 0.0, collective.group(job(), 8, 1)))
    for backward in (False, True):
        found = sent(job(), cp=8, sequence_method=ULYSSES, backward=backward)
        assert found.total == pytest.approx(2 * elements / (0.78 * 4e11) + start)
        assert found.exposed(job(), 1.0) == found.total, "compiled blocks hide nothing"
        assert found.rings == 0.0


def test_ulysses_sends_heads_of_keys_to_all_that_need_them() -> None:
    few = MODEL.model_copy(update={"kv_heads": 2})
    start = float(4 * collective.all_to_all_s(job(), 0.0, collective.group(job(), 8, 1)))
    found = sent(job(few), cp=8, sequence_method=ULYSSES).total - start
    assert found == pytest.approx(2 * 4096 * (4096 + 8 * 128 + 8 * 128 + 4096) * 7 / 8 / (0.78 * 4e11))


def test_projections_hide_what_travels_beside_them() -> None:
    for backward in (False, True):
        found = sent(job(), cp=8, compiled=0, backward=backward)
        assert 0 < found.hidden < found.outside
        assert found.exposed(job(), 0.0) == pytest.approx(found.outside - found.hidden)
        assert sent(job(), cp=4, tp=2, compiled=0, backward=backward).hidden == 0.0


def test_a_ring_hides_behind_the_attention_to_the_block_before() -> None:
    columns = {"cp": 8, "sequence_method": RING_OF_KEYS, "sequence_order": 1}
    block = 4096 * 2 * 1024 * 2 / (0.78 * 4e11) + GPU.link_latency_s
    found = sent(job(), **columns)
    assert found.total == pytest.approx(7 * block)
    assert found.exposed(job(), 0.0) == pytest.approx(7 * block)
    assert found.exposed(job(), 8 * block) < 0.2 * found.total
    assert found.exposed(job(), 80 * block) == pytest.approx(0.08 * found.total), "it slows what it hides behind"


@pytest.mark.parametrize(("order", "part"), [(0, 1.0), (1, 0.75)])
def test_each_received_block_is_merged(order: int, part: float) -> None:
    """A result of 4096 values per token; zigzag shares merge three quarters of it per block."""
    columns = {"cp": 8, "sequence_method": RING_OF_KEYS, "sequence_order": order}
    few, many = (sent(with_merges(moved), **columns) for moved in (10.0, 20.0))
    width = job().model.heads * job().model.head_dim
    rows = job().sequence_length / 8
    wanted = 7 * part * rows * width * 10.0 / (0.8 * GPU.memory_bytes_per_s)
    assert many.merges - few.merges == pytest.approx(wanted, rel=0.1)
    assert (few.total, few.exposed(job(), 1.0)) == (many.total, many.exposed(job(), 1.0))
    assert sent(with_merges(10.0), **{**columns, "cp": 1}).merges == 0.0
    layers = [layer(with_merges(moved), Layouts(**columns), FULL) for moved in (10.0, 20.0)]
    more = layers[1].forward.compute_s - layers[0].forward.compute_s
    assert more == pytest.approx(job().stack.derate * (many.merges - few.merges)), "merges are compute"


@pytest.mark.parametrize(
    ("policy", "merges", "blocks"),
    [("none", 0, 0), ("attention", 1, 1), ("selective", 0, 0), ("keep_attention", 0, 0), ("full", 1, 1)],
)
def test_merges_are_recomputed_with_the_core_of_attention(policy: str, merges: int, blocks: int) -> None:
    """Policies that keep the result of attention keep the merged one; the gaps after the ring's kernels follow it."""
    columns = {"cp": 8, "sequence_method": RING_OF_KEYS, "sequence_order": 1, "recompute": RECOMPUTE.index(policy)}
    few, many = (layer(with_merges(moved), Layouts(**columns), FULL) for moved in (10.0, 20.0))
    share = 0.5
    half = layer(with_merges(20.0), Layouts(**columns, recompute_share=share), FULL)
    more = many.forward.elementwise_s - few.forward.elementwise_s
    assert many.recompute.elementwise_s - few.recompute.elementwise_s == pytest.approx(merges * more, abs=1e-15)
    assert half.recompute.elementwise_s == pytest.approx(share * many.recompute.elementwise_s)
    assert many.recompute.matmul_s == few.recompute.matmul_s
    # Without merges, what a ring adds to small kernels are the gaps after those that it starts.
    ring = layer(with_merges(0.0), Layouts(**columns), FULL)
    alone = layer(job(length=32768 // 8), Layouts(recompute=columns["recompute"]), FULL)
    gaps_s = ring.forward.elementwise_s - alone.forward.elementwise_s
    assert gaps_s == pytest.approx(7 * BLOCK_OPERATORS * 5e-6)
    assert ring.recompute.elementwise_s - alone.recompute.elementwise_s == pytest.approx(blocks * gaps_s, abs=1e-15)


@pytest.mark.parametrize(
    ("method", "count"), [(ULYSSES, 0.0), (ALL_GATHER, 10.0), (USP, 36.0), (STARTRAIL, 24.0 + 12.0)]
)
def test_kernels_within_the_core_are_those_of_keys(method: int, count: float) -> None:
    """StarTrail's teams trade within the core; Ulysses trades heads before and after it."""
    one = sent(job(), cp=8, sequence_method=method, sequence_order=1, sequence_inner=2, sequence_teams=2)
    assert one.core_operators == count
    assert one.operators - one.core_operators == (24.0 if method in (ULYSSES, USP) else 0.0)


def with_merges(moved_bytes: float) -> Any:
    return replace(job(), stack=replace(job().stack, ring_merge_bytes=moved_bytes))


def test_gradients_of_keys_go_round_wide_and_come_home_beside_nothing() -> None:
    found = sent(job(), cp=8, sequence_method=RING_OF_KEYS, backward=True)
    each = 4096 * 2 * 1024 / (0.78 * 4e11)
    # Two transfers of keys, five of keys and gradients, the second-to-last gradients, and the last.
    assert found.total == pytest.approx(7 * (2 + 4) * each + 9 * GPU.link_latency_s)
    assert found.exposed(job(), 1e9) > 4 * each


def test_contiguous_shares_wait_for_the_last_rank() -> None:
    even, late = (busy(job(), cp=4, sequence_method=RING_OF_KEYS, sequence_order=order) for order in (1, 0))
    assert late == pytest.approx(7 / 4 * even, rel=0.02)
    gathered = busy(job(), cp=4, sequence_method=ALL_GATHER)
    assert gathered == pytest.approx(late, rel=0.05)
    assert busy(job(), cp=4, sequence_method=ULYSSES) == pytest.approx(even, rel=0.05)
    # With a window every token but the first ones sees as many keys.
    windows = [busy(job(), WINDOW, cp=4, sequence_method=RING_OF_KEYS, sequence_order=order) for order in (1, 0)]
    assert windows[1] == pytest.approx(windows[0], rel=0.1)


def test_windows_take_their_neighbours_tokens_only() -> None:
    ring = sent(job(), cp=8, sequence_method=RING_OF_KEYS)
    halo = sent(job(), WINDOW, cp=8, sequence_method=RING_OF_KEYS)
    assert halo.total == pytest.approx(4095 * 2 * 1024 * 2 / (0.78 * 4e11) + GPU.link_latency_s)
    assert halo.total < 0.2 * ring.total
    assert halo.exposed(job(), 1.0) < 0.1 * halo.total, "it travels beside the attention to a rank's own tokens"
    wide = sent(job(), Kind(32768, False), cp=8, sequence_method=RING_OF_KEYS)
    assert wide.total == ring.total, "a window of all tokens is none"


def test_windows_cost_what_they_see() -> None:
    assert float(pairs(job(), Layouts(), WINDOW)) == pytest.approx(32 * 32768 * (4096 - 4096**2 / 2 / 32768))


@pytest.mark.parametrize(("heads", "ranks", "most"), [(7, 4, 2), (3, 4, 1), (32, 8, 4)])
def test_uneven_heads_cost_what_the_fullest_rank_has(heads: int, ranks: int, most: int) -> None:
    model = MODEL.model_copy(update={"heads": heads, "kv_heads": heads})
    layouts = Layouts(cp=ranks, sequence_method=ULYSSES)
    assert float(pairs(job(model), layouts, FULL)) == most * 32768**2 / 2


def test_slow_networks_carry_a_ring_of_teams_less_often() -> None:
    """32 ranks on 4 nodes: a plain ring crosses nodes at each step; with teams of four only the placement does.

    With teams of two, rings have eight ranks, and stay in a node if rings rather than teams are contiguous.
    """
    one, order = job(length=131072), {"cp": 32, "sequence_order": 1}
    plain = sent(one, sequence_method=RING_OF_KEYS, **order).total
    seconds = {
        (teams, inside): float(
            sent(one, sequence_method=STARTRAIL, sequence_teams=teams, sequence_inside=at, **order).total
        )
        for teams in (2, 4)
        for at, inside in enumerate(INSIDES)
    }
    assert min(seconds, key=lambda form: seconds[form])[0] == 4
    assert seconds[4, "teams"] == pytest.approx(seconds[4, "rings"], rel=0.3)
    assert seconds[4, "teams"] < 0.5 * plain
    assert seconds[2, "rings"] < 0.7 * seconds[2, "teams"] < plain


def test_usp_keeps_both_to_their_tier() -> None:
    one = job(length=131072)
    both = sent(one, cp=32, sequence_method=USP, sequence_inner=8, sequence_order=1)
    assert both.outside > 0
    assert sum(float(step.times) for step in both.steps) == 3
    assert both.total < sent(one, cp=32, sequence_method=RING_OF_KEYS, sequence_order=1).total
    whole = sent(one, cp=32, sequence_method=USP, sequence_inner=32)
    assert whole.total == pytest.approx(sent(one, cp=32, sequence_method=ULYSSES).total)


def test_groups_that_trade_heads_grow_until_they_share_heads_of_keys() -> None:
    """On 32 ranks larger Ulysses groups send less, as long as each rank has key heads of its own."""
    for devices, keys, best in ((GPU, 8, 8), (GPU, 32, 16), (ONE_LINK, 32, 16), (ONE_LINK, 8, 8)):
        one = job(MODEL.model_copy(update={"kv_heads": keys}), length=131072, devices=devices)
        columns = {"cp": 32, "sequence_method": USP, "sequence_order": 1}
        totals = {inner: float(sent(one, sequence_inner=inner, **columns).total) for inner in (2, 4, 8, 16)}
        assert min(totals, key=lambda inner: totals[inner]) == best


def test_dsp_trades_the_hidden_state_twice_per_pair_of_layers() -> None:
    model = MODEL.model_copy(update={"grid": (128, 256), "layer_types": ("row", "column") * 2})
    one, columns = job(model), {"cp": 8, "sequence_method": DSP, "sequence_order": 2}
    assert [kind.turns for kind in kinds(model)] == [1, 1, 1, 1]
    group = collective.group(one, 8, 1)
    each = float(collective.all_to_all_s(one, 4096 * 4096 * 2, group))
    assert [sent(one, kind, **columns).total for kind in kinds(model)] == pytest.approx([each] * 4)
    whole = busy(one, kinds(model)[0])
    assert busy(one, kinds(model)[0], **columns) == pytest.approx(whole / 8, rel=0.3)
    assert float(pairs(one, Layouts(**columns), kinds(model)[1])) == 32 * 128**2 / 2 * 32
    assert whole < 0.01 * busy(one, FULL)


def test_columns_price_what_single_layouts_cost() -> None:
    rows = [
        {
            "cp": cp,
            "tp": tp,
            "sequence_method": method,
            "sequence_order": order,
            "sequence_inner": inner,
            "micro_batch": 2,
        }
        | {"sequence_teams": 2 if method == STARTRAIL and cp >= 4 else 1, "compiled": 0}
        for cp in (1, 8)
        for tp in (1, 2)
        for method in range(5)
        for order in (0, 1)
        for inner in (1, 2)
        if cp % inner == 0
    ]
    table = Layouts(**{name: np.array([row[name] for row in rows]) for name in rows[0]})
    for kind in (FULL, WINDOW):
        for backward in (False, True):
            together = exchange(job(), table, kind, backward=backward)
            seconds = attention_s(job(), table, kind, backward=backward)
            shown = together.exposed(job(), 1e-3 * np.ones(len(rows)))
            for index, row in enumerate(rows):
                alone = sent(job(), kind, backward=backward, **row)
                assert float(np.broadcast_to(together.total, len(rows))[index]) == pytest.approx(float(alone.total))
                assert float(shown[index]) == pytest.approx(float(alone.exposed(job(), 1e-3)))
                assert float(seconds[index]) == pytest.approx(
                    float(attention_s(job(), Layouts(**row), kind, backward=backward))
                )


# Memory.


def test_ulysses_keeps_results_twice_and_heads_as_they_are_dealt() -> None:
    rows, query, key = 32768 / 4, 4096, 1024
    columns = {"cp": 4, "sequence_method": ULYSSES}
    assert float(saved_bytes(job(), Layouts(**columns), 0)) == rows * query * 2
    assert float(saved_bytes(job(), Layouts(**columns), ATTENTION)) == 0.0
    # 7 heads on 4 ranks: the busiest rank computes 2 of them, for all tokens.
    odd = job(MODEL.model_copy(update={"heads": 7, "kv_heads": 7}))
    more = 3 * 7 * 128 * 2 * (8 / 7 - 1) + 7 * 128 * 2 * 8 / 7 + 7 * 4 * (8 / 7 - 1)
    assert float(saved_bytes(odd, Layouts(**columns), 0)) == pytest.approx(rows * more)
    # The only key head is replicated on all four ranks.
    shared = job(MODEL.model_copy(update={"kv_heads": 1}))
    assert float(saved_bytes(shared, Layouts(**columns), ATTENTION)) == rows * 2 * 128 * 2 * 3
    assert float(saved_bytes(job(), Layouts(cp=4, sequence_method=RING_OF_KEYS), 0)) == 0.0
    assert key == MODEL.kv_heads * MODEL.head_dim


def test_buffers_of_each_method() -> None:
    """In units of one rank's queries, with as many key as query heads: ring buffers do not grow with the ranks."""
    model = MODEL.model_copy(update={"kv_heads": 32})
    unit = 4096 * 4096 * 2

    def units(ranks: int, **columns: Any) -> float:
        one = job(model, length=4096 * ranks)
        return float(buffer_bytes(one, Layouts(cp=ranks, **columns))) / unit

    for ranks in (4, 16):
        assert units(ranks, sequence_method=ULYSSES) == 2 * 3
        # Two blocks of keys and values, four of wide gradients, and the gradients of the queries.
        assert units(ranks, sequence_method=RING_OF_KEYS) == 4 + 16 + 2
        assert units(ranks, sequence_method=ALL_GATHER) == 2 * ranks + 4 * ranks + 2
    trails = [units(16, sequence_method=STARTRAIL, sequence_teams=teams) for teams in (1, 2, 4)]
    assert trails == [4 + 12 + 2 + 3, 2 * 21, 4 * 21]
    windowed = job(model.model_copy(update={"window": 1025, "layer_types": ("sliding",) * 4}), length=32768)
    ring = float(buffer_bytes(windowed, Layouts(cp=8, sequence_method=RING_OF_KEYS))) / unit
    assert ring == pytest.approx(1024 / 4096 * (2 + 4) + 2)


def test_usp_communicates_in_two_groups() -> None:
    groups = [
        int(communicators(job(), Layouts(cp=8, sequence_method=method, sequence_inner=2, zero=3)).collective)
        for method in (ULYSSES, RING_OF_KEYS, USP)
    ]
    assert groups == [2, 2, 3], "the group of the world, which shares the state, beside"


def test_memory_of_a_rank_falls_with_the_ranks_that_share_a_sequence() -> None:
    for method in (at for at, name in enumerate(SEQUENCE_METHODS) if name not in ON_GRIDS):
        one = job(length=262144)
        totals = [
            float(peak_memory(one, Layouts(cp=cp, sequence_method=method, zero=3, recompute=POLICY)).total_bytes)
            for cp in (1, 4, 16)
        ]
        assert totals == sorted(totals, reverse=True), method


# Closed forms and counts.


@st.composite
def even_cases(draw: st.DrawFn) -> tuple[TrainingWork, Layout, Kind]:
    """Draw sizes that divide evenly, so that each rank sends as much as the busiest one."""
    method = draw(st.sampled_from([name for name in SEQUENCE_METHODS if name not in ON_GRIDS]))
    inner = draw(st.sampled_from([2, 4])) if method == "usp" else 1
    teams = draw(st.sampled_from([2, 3, 4])) if method == "startrail" else 1
    ranks = {"usp": inner * draw(st.integers(2, 5)), "startrail": teams**2 * draw(st.integers(1, 4))}.get(
        method, draw(st.integers(2, 9))
    )
    trading = ranks if METHODS[method].heads == "all" else inner
    keys = trading * draw(st.integers(1, 3)) if draw(st.booleans()) else 1
    queries = max(keys, trading) * draw(st.integers(1, 3))
    length = 2 * ranks * draw(st.integers(1, 40))
    window = draw(st.integers(2, 2 * length)) if method in ("ring", "all_gather") else None
    kind = Kind(window, False)
    order = draw(st.sampled_from(["contiguous", "zigzag"])) if window is None else "contiguous"
    model = MODEL.model_copy(
        update={"heads": queries, "kv_heads": keys, "head_dim": 8, "hidden": 64, "window": window}
        | ({} if window is None else {"layer_types": ("sliding",) * 4})
    )
    layout = new_layout(
        mesh=Mesh(cp=ranks), zero=0, micro_batch=draw(st.integers(1, 3)), accumulation=1, recompute=("none",) * 4,
        compile="none", stages=((0, 4),), sequence_method=method, sequence_order=order, sequence_inner=inner,
        sequence_teams=teams, sequence_inside=draw(st.sampled_from(["teams", "rings"])),
    )  # fmt: skip
    return (
        TrainingWork(model, ONE_LINK, length, draw(st.sampled_from(["bf16", "fp32", "fp64"])), global_batch=64),
        layout,
        kind,
    )


@given(even_cases())
@settings(max_examples=80, deadline=None)
def test_seconds_follow_the_bytes_that_each_method_counts(case: tuple[TrainingWork, Layout, Kind]) -> None:
    one, layout, kind = case
    exact = [
        tuple(map(sum, zip(*(part.bytes(one.compute_bytes) for part in parts), strict=True)))
        for parts in sent_by_rank(SequenceTeams.of(one, layout), heads_of(one, layout)._replace(window=kind.window))
    ]
    for index, backward in enumerate((False, True)):
        seconds = float(exchange(one, encode(layout), kind, backward=backward).total)
        busiest = layout.micro_batch * max(sums[index] for sums in exact)
        if layout.sequence.order == "contiguous" and (kind.window or layout.sequence.method in ("ring", "usp")):
            # Early ranks send keys and late ranks gradients; a rank in the middle of many sends almost all of both.
            assert 0.3 * seconds <= busiest <= seconds * (1 + 1e-9)
        else:
            assert seconds == pytest.approx(busiest, rel=1e-9), layout


def test_bytes_of_a_step_follow_policies_and_micro_batches() -> None:
    def sent_bytes(method: str, policy: str, **changes: Any) -> int:
        layout = new_layout(
            mesh=Mesh(cp=4), zero=0, micro_batch=2, accumulation=3, recompute=(policy,) * 4, compile="none",
            stages=((0, 4),), sequence_method=method, sequence_order="zigzag" if method != "ulysses" else "contiguous",
            **changes,
        )  # fmt: skip
        return traffic_bytes(job(), layout)["sequence"]

    rows, key = 32768 / 4, 2 * 1024
    ring = 3 * 2 * 4 * 3 * rows * key
    assert sent_bytes("ring", "none") == ring * (2 + 2 + 4)
    assert sent_bytes("ring", "attention") == sent_bytes("ring", "full") == ring * (2 + 2 + 2 + 4)
    assert sent_bytes("ring", "selective") == sent_bytes("ring", "keep_attention") == sent_bytes("ring", "none")
    traded = 3 * 2 * 4 * 3 / 4 * rows * (2 * 4096 + key) * 2
    assert sent_bytes("ulysses", "attention") == sent_bytes("ulysses", "none") == 2 * traded
    assert sent_bytes("ulysses", "full") == 3 * traded
    both = sent_bytes("usp", "none", sequence_inner=2)
    assert both < sent_bytes("usp", "attention", sequence_inner=2) < sent_bytes("usp", "full", sequence_inner=2)


def test_gradients_and_parameters_are_shared_by_ranks_of_one_sequence_too() -> None:
    """Each of four ranks that share a sequence has gradients of its tokens: they reduce as data-parallel ranks do."""

    def moved(**changes: Any) -> dict[str, int]:
        layout = new_layout(
            micro_batch=1, accumulation=2, recompute=("none",) * 4, compile="none", stages=((0, 4),), **changes
        )
        return traffic_bytes(job(), layout)

    for zero in (0, 1, 2, 3):
        whole = {"dp_replicate": 4} if zero == 0 else {"dp_shard": 4}
        alone, shared = moved(mesh=Mesh(**whole), zero=zero), moved(mesh=Mesh(cp=4), zero=zero)
        assert shared.pop("sequence") > alone.pop("sequence") == 0
        assert shared == alone


def test_more_than_some_ranks_are_counted_by_a_few_of_them() -> None:
    heads = heads_of(job(), new_layout(
        mesh=Mesh(), zero=0, micro_batch=1, accumulation=1, recompute=("none",) * 4, compile="none", stages=((0, 4),)
    ))  # fmt: skip
    for method, order in (("ring", "zigzag"), ("all_gather", "contiguous"), ("ulysses", "contiguous")):
        team = SequenceTeams(method, 96, order, 1, 1, "teams", 96 * 8 + 5, 0)  # type: ignore[arg-type]
        few = [sum(part.bytes(2)[0] for part in parts) for parts in sent_by_rank(team, heads)]
        assert len(few) == 7
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("partool.cost.traffic.sequence.MANY", 96)
            every = [sum(part.bytes(2)[0] for part in parts) for parts in sent_by_rank.__wrapped__(team, heads)]
        assert len(every) == 96
        assert max(few) == max(every)


# Published properties of the methods.


@pytest.mark.parametrize("exponent", [4, 5, 6, 7, 8])
def test_best_teams_of_uniform_links(exponent: int) -> None:
    """A rank sends 2·P/C + 2·(C - 1) times its keys and values forward: least near the root of P."""
    ranks = 2**exponent
    model = MODEL.model_copy(update={"kv_heads": 32})
    one = TrainingWork(model, ONE_LINK, 64 * ranks, "bf16", global_batch=64)
    sizes = [teams for teams in (1, 2, 4, 8, 16) if ranks % teams**2 == 0]
    totals = [
        float(sent(one, cp=ranks, sequence_method=STARTRAIL, sequence_teams=teams, sequence_order=1).total)
        for teams in sizes
    ]
    best = sizes[int(np.argmin(totals))]
    assert best <= ranks**0.5 < 4 * best
    ring = float(sent(one, cp=ranks, sequence_method=RING_OF_KEYS, sequence_order=1).total)
    assert min(totals) < ring
    assert totals[0] == pytest.approx(ring), "teams of one are a plain ring"
    assert float(sent(one, cp=min(ranks, 32), sequence_method=ULYSSES).total) < min(totals)


@st.composite
def steps(draw: st.DrawFn) -> tuple[TrainingWork, Layout]:
    method = draw(st.sampled_from(SEQUENCE_METHODS))
    changes: dict[str, Any] = {"layers": 8}
    if method == "dsp":
        changes |= {"grid": (draw(st.sampled_from([31, 64])), 96), "layer_types": ("row", "column") * 4}
    elif draw(st.booleans()):
        changes |= {"window": 1024, "layer_types": ("sliding", "sliding", "full", "sliding") * 2}
    pp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([4, 8, 9]))
    layers = 8 // pp
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    sharing = {"dp_shard" if zero else "dp_replicate": draw(st.sampled_from([1, 2]))}
    layout = new_layout(
        mesh=Mesh(pp=pp, cp=cp, tp=draw(st.sampled_from([1, 2])), **sharing), zero=zero, micro_batch=1,
        accumulation=draw(st.sampled_from([2, 8])), recompute=(draw(st.sampled_from(RECOMPUTE)),) * 8, compile="none",
        stages=tuple((at * layers, (at + 1) * layers) for at in range(pp)), sequence_method=method,
        sequence_order="grid" if method == "dsp" else draw(st.sampled_from(["contiguous", "zigzag"])),
        sequence_inner={4: 2, 8: 4, 9: 3}[cp] if method == "usp" else 1,
        sequence_teams={4: 2, 8: 2, 9: 3}[cp] if method == "startrail" else 1,
        sequence_inside=draw(st.sampled_from(INSIDES)),
    )  # fmt: skip
    grid = changes.get("grid", (4, 4096))
    batch = layout.derived.accumulation * layout.mesh.dp
    return TrainingWork(MODEL.model_copy(update=changes), GPU, grid[0] * grid[1], "bf16", global_batch=batch), layout


@given(steps())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whole_steps_of_every_method(case: tuple[TrainingWork, Layout]) -> None:
    one, layout = case
    found = predict_time(one, layout, 1)
    assert float(bound_s(one, encode(layout))) <= found.step_time_s * 1.001
    assert found.step_time_s == pytest.approx(sum(found.terms_s.values()))
    assert all(value >= 0 for value in found.terms_s.values())
    assert found.terms_s["sequence_parallel"] > 0 or layout.sequence.method != "dsp"
    assert found.terms_s["sequence_parallel"] <= found.breakdown_s["sequence_parallel"] * layout.mesh.pp * (1 + 1e-9)
    assert found.traffic_bytes["sequence"] > 0
    better = replace(one, devices=GPU.model_copy(update={"link_bytes_per_s": 8e11, "fabric_bytes_per_s": 1e11}))
    assert predict_time(better, layout, 1).step_time_s <= found.step_time_s * (1 + 1e-9)


def test_turns_of_dsp_are_counted_as_they_are_priced() -> None:
    model = MODEL.model_copy(update={"grid": (32, 64), "layer_types": ("row", "row", "column", "row")})
    one = TrainingWork(model, ONE_LINK, 2048, "bf16", global_batch=64)
    layout = new_layout(
        mesh=Mesh(cp=8), zero=0, micro_batch=2, accumulation=3, recompute=("full",) * 4, compile="none",
        stages=((0, 4),), sequence_method="dsp", sequence_order="grid",
    )  # fmt: skip
    each = 2 * 2048 / 8 * 4096 * 2 * 7 / 8
    assert traffic_bytes(one, layout)["sequence"] == 3 * 2 * 4 * each
    priced = [exchange(one, encode(layout), kind, backward=False).total for kind in kinds(model)]
    assert sum(priced) == pytest.approx(4 * each)
