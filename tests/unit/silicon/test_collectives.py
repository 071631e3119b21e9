"""Prices of collectives against measurements, and the convex lower bounds that the search takes."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from _bounds import LAYOUTS, above
from often import often
from random_problems import document, problem_of

from partool.catalog.silicon.collectives import OPERATIONS, Operation, measured_device
from partool.catalog.silicon.grid import entries
from partool.cost import collective
from partool.cost.case import Layouts
from partool.cost.silicon import collectives as prices
from partool.cost.training.sync import LeastElements, PassSeconds, RankParameters, sync
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork

sys.path.insert(0, str(Path(__file__).parents[2] / "silicon"))
judge = pytest.importorskip("judge_collectives", reason="pyarrow reads the measurements")

DEVICES = ("a100-80", "b200", "b300", "gb200", "gb300", "h100-sxm", "h200", "l40s", "rtx-pro-6000")
needs_data = pytest.mark.skipif(not judge.DATA.is_dir(), reason="the measurements are not part of the project")


def by_device(ratios: Any) -> dict[str, Any]:
    return {
        device: judge.Errors.of(one for at, of in ratios.items() if at[0] == device for one in of)
        for device in {at[0] for at in ratios}
    }


def assert_close(ratios: Any) -> None:
    errors = by_device(ratios)
    assert set(errors) == set(DEVICES)
    for device, error in errors.items():
        assert error.median <= 0.06, (device, error)
        assert error.p90 <= (0.25 if device == "l40s" else 0.20), (device, error)


@pytest.mark.parametrize("ratios", [judge.shipped, judge.left_out], ids=["shipped", "sizes left out"])
def test_prices_are_close_to_a_sample_of_the_measurements(ratios: Any) -> None:
    assert_close(ratios(judge.sampled()))


@needs_data
@pytest.mark.parametrize("ratios", [judge.shipped, judge.left_out], ids=["shipped", "sizes left out"])
def test_prices_are_close_to_all_measurements(ratios: Any) -> None:
    assert_close(ratios(judge.rows()))


@needs_data
def test_the_shipped_tables_are_those_of_the_measurements() -> None:
    made = judge.distilled(judge.rows())
    assert set(made) == set(entries("collectives"))
    for name, table in made.items():
        device, operation, _ = name.split("/")
        shipped = judge.prices.collectives(device, operation)
        assert {**table.origin, "axes": shipped.origin["axes"]} == shipped.origin
        assert np.max(np.abs(shipped.log_s - table.log_s)) <= 0.5 * 0.004 + 1e-9


def test_exchanges_of_tokens_are_close_to_a_sample() -> None:
    errors = {at: judge.Errors.of(of) for at, of in judge.exchanges(judge.sampled_exchanges()).items()}
    for at in (("h100-sxm", 1), ("h100-sxm", 2), ("h100-sxm", 4), ("h200", 1)):
        assert errors[at].median <= 0.12, (at, errors[at])
    for device in ("b200", "b300", "gb200", "gb300"):
        assert errors[device, 1].median <= 0.35, (device, errors[device, 1])


def test_published_lines_of_nodes_with_adapters_of_their_devices_are_close() -> None:
    """Lines of EFA and of racks err more: the results page lists them all."""
    ratios = [
        line["predicted_us"] / float(line["us"])
        for line in judge.published()
        if line["fabric"] in ("ib-ndr", "roce-400") and line["ranks_per_node"] == "8" and int(line["bytes"]) >= 4096
    ]
    errors = judge.Errors.of(ratios)
    assert errors.count > 150
    assert errors.median <= 0.12, errors
    assert errors.p90 <= 0.30, errors


@pytest.mark.parametrize(("fabric", "median", "p90"), [("efa", 0.15, 0.32), ("efa-p4d", 0.22, 0.42)])
def test_published_lines_of_efa_are_nearer(fabric: str, median: float, p90: float) -> None:
    """Small messages start late; the protocol of high bandwidth adds no more than on other networks."""
    lines = [line for line in judge.published() if line["fabric"] == fabric and int(line["bytes"]) >= 4096]
    errors = judge.Errors.of(line["predicted_us"] / float(line["us"]) for line in lines)
    assert errors.count >= 20
    assert (errors.median <= median, errors.p90 <= p90) == (True, True), errors


@pytest.mark.parametrize("accelerator", [*DEVICES, "h800", "gh200-96", "a10", "rtx-5090", "h100-pcie"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_times_grow_with_bytes_without_steps_at_the_ends(accelerator: str, operation: Operation) -> None:
    devices = judge.machine(accelerator, per_node=8)
    sizes = np.array([0.0, 1.0, *np.geomspace(256, 2.0**40, 400)])
    for members in range(2, 9):
        seconds = prices.seconds(devices, operation, sizes, members)
        assert seconds is not None
        assert np.all(seconds > 1e-6)
        assert np.all(np.diff(seconds) >= -1e-15)
        last = 2.0**29
        at, after = (float(prices.seconds(devices, operation, size, members)) for size in (last, 2.0 * last))
        assert after == pytest.approx(2.0 * at), "beyond the largest size, its rate"
        small = (float(prices.seconds(devices, operation, size, members)) for size in (0.0, 1024.0))
        assert next(small) == pytest.approx(next(small)), "below the smallest size, its time"
    assert prices.seconds(devices, operation, 1e9, 1) == 0.0


def test_numbers_of_ranks_between_the_measured_ones_take_times_between() -> None:
    devices = judge.machine("h100-sxm")
    for size in (4096.0, 1e6, 1e9):
        seconds = prices.seconds(devices, "all_gather", size, np.arange(2, 9))
        assert np.all(np.diff(seconds) > 0)
    rack = judge.machine("gb200", nodes=18)
    large = prices.seconds(rack, "all_reduce", 2.0**33, np.array([4, 8, 72]))
    assert large[2] == pytest.approx(large[0], rel=0.03), "switches sum: bytes take the same time"
    small = prices.seconds(rack, "all_to_all", 1024.0, np.array([4, 8, 72]))
    assert np.all(np.diff(small) >= 0)


def test_pcie_cards_that_are_apart_take_the_time_of_all_cards_between_them() -> None:
    """Tensor groups of neighbours and data groups across them share the links of a server without switches."""

    def seconds(accelerator: str, size: int, stride: int) -> float:
        job: Any = judge._Job(judge.machine(accelerator, per_node=8))
        return float(collective.inside_s(job, "all_reduce", 32e6, collective.group(job, size, stride)))

    assert seconds("l40s", 2, 4) == seconds("l40s", 4, 2) == seconds("l40s", 8, 1) > 4.0 * seconds("l40s", 4, 1)
    assert seconds("h100-sxm", 2, 4) == seconds("h100-sxm", 2, 1)


@pytest.mark.parametrize("accelerator", ["l40s", "rtx-pro-6000", "a10", "a100-80", "gb200", "h100-sxm"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_more_ranks_than_measured_take_no_less_time(accelerator: str, operation: Operation) -> None:
    devices = judge.machine(accelerator, per_node=24)
    members = np.arange(2, 25)
    for size in (1024.0, 1e6, 1e9):
        seconds = prices.seconds(devices, operation, size, members)
        assert seconds is not None
        most = 4 if accelerator == "gb200" else 8
        assert np.all(np.diff(seconds[members >= most]) >= 0), "beyond the measured ranks"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_more_cards_share_the_lanes_of_eight(operation: Operation) -> None:
    """Beyond eight cards without links, bytes take in proportion to n-1; behind switches to (n-1)/n or not at all."""

    def more(accelerator: str) -> float:
        devices = judge.machine(accelerator, per_node=16)
        eight, sixteen = (float(prices.seconds(devices, operation, 2.0**34, members) or 0.0) for members in (8, 16))
        return sixteen / eight

    assert more("l40s") == pytest.approx(15 / 7, rel=0.001)
    assert more("rtx-pro-6000") == pytest.approx(15 / 7, rel=0.001)
    assert more("a100-80") == pytest.approx(15 / 14, rel=0.01)
    assert more("h100-sxm") == pytest.approx(1.0 if operation == "all_reduce" else 15 / 14, rel=0.01)
    sixteen = prices.origin(judge.machine("l40s", per_node=16), operation, 16)
    assert (sixteen.kind, "16 cards share the lanes of 8" in sixteen.text) == ("scaled", True)


@pytest.mark.parametrize("accelerator", ["h100-sxm", "l40s", "mi300x", "cpu"])
def test_one_rank_per_node_starts_a_collective_too(accelerator: str) -> None:
    """What a collective takes to start does not depend on whether ranks share a node."""
    job: Any = judge._Job(judge.machine(accelerator, nodes=4, per_node=2))
    alone = collective.group(job, 4, 2)
    assert (int(alone.inside), int(alone.domains)) == (1, 4)
    latency_s = job.devices.link_latency_s
    later: Any = judge._Job(job.devices.model_copy(update={"link_latency_s": 3.0 * latency_s}))
    for of in judge.OF_OPERATION.values():
        for size in (0.0, 1e6):
            more = float(of(later, size, alone)) - float(of(job, size, alone))
            assert more == pytest.approx(2.0 * latency_s)
    assert float(collective.gather_s(job, 1e6, collective.group(job, 1, 1))) == 0.0


def test_only_names_choose_a_table() -> None:
    assert measured_device("h800", "h100-sxm") == "h100-sxm"
    assert [measured_device(name, "") for name in ("t4", "a10", "l40s")] == ["l40s"] * 3
    assert measured_device("h100-pcie", "h100-sxm") == measured_device("rtx-5090", "rtx-pro-6000") == "rtx-pro-6000"
    assert measured_device("mi300x", "mi300x") == measured_device("v100-32", "") == measured_device("mine", "") == ""
    h100 = judge.machine("h100-sxm")
    renamed = h100.model_copy(update={"accelerator": "mine", "measured_as": ""})
    assert prices.seconds(renamed, "all_reduce", 1e9, 8) is None
    assert prices.seconds(judge.machine("cpu", per_node=4), "all_reduce", 1e9, 4) is None


def test_memory_changes_no_price_and_rates_scale_it() -> None:
    def at(size: float, **given: Any) -> float:
        seconds = prices.seconds(judge.machine("h100-sxm", **given), "all_gather", size, 8)
        assert seconds is not None
        return float(seconds)

    for size in (0.0, 1e6, 1e10):
        assert at(size, memory_gib=20) == at(size)
    start = at(0.0)
    assert at(0.0, link_gb_per_s=225) == start
    assert at(1e8, link_gb_per_s=225) - start == pytest.approx(2.0 * (at(1e8) - start), rel=0.01)
    assert at(0.0, link_latency_us=17.0) == pytest.approx(2.0 * start)


def test_a_price_says_where_it_comes_from() -> None:
    h100, h800 = judge.machine("h100-sxm"), judge.machine("h800")
    kinds = [prices.origin(h100, "all_reduce", 8).kind, prices.origin(h100, "all_reduce", 6).kind]
    assert kinds == ["measured", "interpolated"]
    assert "NCCL" in prices.origin(h100, "all_reduce", 8).text
    assert prices.origin(h800, "all_reduce", 8).kind == "scaled"
    assert prices.origin(judge.machine("h100-sxm", link_gb_per_s=200), "all_reduce", 8).kind == "scaled"
    assert prices.origin(judge.machine("l40s", topology="switch", link_gb_per_s=300), "all_reduce", 2).kind == "assumed"
    assert prices.origin(judge.machine("gb200", nodes=2), "all_reduce", 8).kind == "scaled"
    assert prices.origin(judge.machine("mi300x"), "all_reduce", 8).kind == "assumed"


@pytest.mark.parametrize("accelerator", DEVICES)
def test_lower_bounds_are_convex_below_the_times_and_near_them(accelerator: str) -> None:
    devices = judge.machine(accelerator)
    for operation in OPERATIONS:
        for members in (2, 3, devices.per_node):
            for least in (0.0, 3e5, 3e7):
                sizes = np.linspace(max(least, 1.0), 40.0 * max(least, 1e5), 1500)
                exact = prices.seconds(devices, operation, sizes, members)
                bound = prices.seconds(devices, operation, sizes, members, least)
                assert exact is not None
                assert bound is not None
                assert np.all(bound <= exact * (1.0 + 1e-12))
                assert np.all(np.diff(bound, 2) >= -1e-12 * np.max(bound)), (operation, members, least)
                # What messages of one size take together does not fall with their number.
                counts = np.arange(1.0, 9.0)
                whole = np.array(8.0 * max(least, 1e5))
                total = counts * prices.seconds(devices, operation, whole / counts, members, 0.0)
                assert np.all(np.diff(total) >= -1e-12)
    close, exact = (prices.seconds(devices, "all_gather", 2e8, 2, least) for least in (1e8, None))
    assert close == pytest.approx(float(exact), rel=0.1)


MODEL = ModelConfig(layers=8, hidden=1024, ffn_hidden=4096, heads=8, kv_heads=8, head_dim=128, vocab=32000)


def mean_and_slowest(seed: int, *, bounded: bool) -> tuple[float, float]:
    """Return seconds of collectives of the mean of random pipeline ranks, and those of the slowest of them."""
    pick = np.random.default_rng(seed)
    devices = judge.machine(str(pick.choice(DEVICES)), nodes=int(pick.choice([1, 2, 4])), per_node=8)
    job = TrainingWork(MODEL, devices, 1024, "bf16", global_batch=64)
    layouts = Layouts(pp=4, shards=int(pick.choice([2, 4, 8])), replicas=int(pick.choice([1, 2])), zero=int(pick.choice(
        [0, 1])))  # fmt: skip
    sizes, none = (
        10.0 ** (pick.uniform(4.0, 7.0) + pick.choice([0.1, 0.5, 1.0]) * pick.random(4)),
        PassSeconds(0.0, 0.0),
    )
    # Ranks whose collectives take about the same time: many small groups or few large ones.
    one = sync(job, layouts, RankParameters(sizes, 0.0 * sizes, np.ones(4)), none)
    groups = 1e-2 / (one.gradient_exposed_s + one.gather_exposed_s) * (1.0 + 0.02 * pick.random(4))
    exact = sync(job, layouts, RankParameters(groups * sizes, 0.0 * groups, groups), none)
    least = LeastElements(float(np.min(sizes)), 0.0) if bounded else None
    mean = RankParameters(float(np.mean(groups * sizes)), 0.0, float(np.mean(groups)), 0.0, 13.0, least)
    shared = sync(job, layouts, mean, none)
    return (
        float(shared.gradient_exposed_s + shared.gather_exposed_s),
        float(np.max(exact.gradient_exposed_s + exact.gather_exposed_s)),
    )


def test_no_mean_of_pipeline_ranks_is_slower_than_the_slowest() -> None:
    """Times of tables are not convex: without the lower bound, the mean of some ranks exceeds each of them."""
    pairs = [mean_and_slowest(seed, bounded=True) for seed in range(150)]
    assert all(mean <= slowest * (1.0 + 1e-9) for mean, slowest in pairs)
    unbounded = [mean_and_slowest(seed, bounded=False) for seed in range(150)]
    assert any(mean > slowest * 1.001 for mean, slowest in unbounded)


NAMES = ("h100-sxm", "l40s", "gb200", "a100-80", "b200", "rtx-pro-6000", "h800", "a10", "gh200-96", "h200")


@pytest.mark.parametrize("seed", often(range(40), kept=(0, 1, 2)))
def test_no_bound_of_devices_with_tables_is_above_the_exact_time(seed: int) -> None:
    pick = Random(seed)
    given = document(pick.choice)
    nodes, per_node = pick.choice([1, 2, 4]), pick.choice([2, 4, 8])
    given["hardware"] = {"accelerator": NAMES[seed % len(NAMES)], "nodes": nodes, "per_node": per_node}
    given["training"] |= {"precision": "bf16", "global_batch": nodes * per_node * pick.choice([1, 2, 4])}
    assert above(problem_of(given), seed, LAYOUTS) == []


def test_every_operation_has_a_price_across_nodes() -> None:
    job = TrainingWork(MODEL, judge.machine("h100-sxm", nodes=16), 1024, "bf16", global_batch=64)
    everyone = collective.group(job, 128, 1)
    for of in judge.OF_OPERATION.values():
        seconds = of(job, np.geomspace(1.0, 1e11, 300), everyone)
        assert np.all(np.diff(seconds) >= 0)
        assert np.all(seconds > 1e-5)


def test_a_sum_over_nodes_of_cpus_takes_no_less_than_one_message() -> None:
    job: Any = judge._Job(judge.machine("cpu", nodes=2, per_node=1))
    message_s = float(collective.send_s(job, 8.0, 1))
    assert float(collective.all_reduce_s(job, 8.0, collective.group(job, 2, 1))) >= 2.0 * message_s
