"""Ways to gather with ZeRO, and units with idle experts, against one process in float64."""

from __future__ import annotations

import functools
from typing import Any

import _zero_controls_worker as worker
import _zero_worker as zero
import pytest
import test_zero
import torch
from _ranks import Pools, RankError, Results
from test_zero import assert_same_run, assert_same_weights

from partool.cost.training.gathers import Messages, gathers, kept_bytes, reductions
from partool.work.gathers import Controls

ELEMENT_BYTES = 8
CASES = {ranks: worker.cases(ranks) for ranks in (2, 4)}


@pytest.fixture(scope="module", autouse=True)
def fewer_steps() -> Any:
    before, zero.STEPS = zero.STEPS, worker.STEPS
    yield
    zero.STEPS = before


@pytest.fixture(scope="module")
def results(pools: Pools) -> dict[int, Results]:
    return {ranks: Results(pools, ranks, worker.run_case) for ranks in CASES}


@functools.cache
def reference(experts: bool) -> dict[str, Any]:
    test_zero.reference.cache_clear()  # of other steps
    try:
        if not experts:
            return test_zero.reference()
        with worker.with_experts():
            return test_zero.reference()
    finally:
        test_zero.reference.cache_clear()


FP64 = [(ranks, name) for ranks in CASES for name, case in CASES[ranks].items() if case.precision == "fp64"]


@pytest.mark.timeout(330)
@pytest.mark.parametrize(("ranks", "name"), FP64)
def test_equals_one_process(results, ranks, name):
    assert_same_run(results[ranks][name], reference(name.startswith("experts")))


def test_ranks_have_idle_experts():
    """The last rank of two sends nothing to any expert in even steps, and to one of them in odd ones."""
    used = []
    for step in range(worker.STEPS):
        tokens, _ = worker.expert_samples(step)
        used.append(set((tokens[-zero.SEQUENCES // 2 :] % (worker.EXPERTS + 1)).flatten().tolist()))
    assert used[0] == used[2] == {worker.EXPERTS}
    assert used[1] != used[3]
    assert all(len(each) == 1 for each in used)


@pytest.mark.timeout(330)
def test_narrow_types_compute_the_same_bits(results):
    """The way of gathering changes no bit; gradients of an expert idle in one of two micro-batches add up in fp32."""
    two = results[2]
    for parameter, want in two["bf16"]["weights"].items():
        assert torch.equal(two["bf16 both"]["weights"][parameter], want), parameter
    assert two["experts bf16"]["losses"] == pytest.approx(reference(True)["losses"], abs=3e-2)


def units(name: str, *, trained: bool = False) -> list[list[tuple[int, ...]]]:
    """Return the shapes of units as the runtime makes them; leaves are units of their own."""
    model = worker.ExpertModel() if name.startswith("experts") else zero.Model(tied=False)
    layers: list[list[tuple[int, ...]]] = []
    outer = name == "experts layer"
    for group in model.groups():
        named = [(n, tuple(p.shape)) for m in group for n, p in m.named_parameters()]
        leaf = [shape for n, shape in named if n.startswith("moe.") and not outer]
        rest = [s for n, s in named if (outer or not n.startswith("moe.")) and not (trained and "unused" in n)]
        layers += [unit for unit in (leaf, rest) if unit]
    return layers


COUNTED = [(n, name) for n, name in FP64 if CASES[n][name].mesh[0] == 1 and CASES[n][name].recompute == "none"]


@pytest.mark.timeout(330)
@pytest.mark.parametrize(("ranks", "name"), COUNTED)
def test_counted_bytes_equal_the_formulas(results, ranks, name):
    case, counted = CASES[ranks][name], results[ranks][name]["traffic"]
    controls = Controls(case.gather, case.prefetch, case.persistent)
    common = {"zero": case.zero, "ranks": ranks, "micro_batches": case.accumulation, "element_bytes": ELEMENT_BYTES}
    for kind, want in (
        ("all_gather", gathers(units(name), controls, **common)),
        ("reduce_scatter", reductions(units(name, trained=True), **common)),
    ):
        got = counted.get(kind, {"calls": 0, "sent": 0})
        assert Messages(got["calls"], got["sent"]) == want, kind
    if case.zero > 0:
        # True reduce-scatters: gradients cost what a gather costs, and nothing else is summed.
        assert "all_reduce" not in counted


@pytest.mark.timeout(330)
def test_persistent_parameters_stay_and_no_others(results):
    for ranks, name in FP64:
        case = CASES[ranks][name]
        controls = Controls(case.gather, case.prefetch, case.persistent if case.zero == 3 else 0)
        want = kept_bytes(units(name), controls, ranks=case.mesh[1], element_bytes=ELEMENT_BYTES)
        assert results[ranks][name]["kept"] == want, name
    assert results[2]["persistent"]["kept"] > 0


def test_comparison_can_fail():
    with worker.with_experts():
        other = test_zero.reference(decay_vectors=True)
        test_zero.reference.cache_clear()
    with pytest.raises(AssertionError, match="differs"):
        assert_same_weights(other["weights"], reference(True)["weights"])


@pytest.mark.long
@pytest.mark.timeout(330)
def test_idle_experts_without_a_leaf_stop_the_run(pools):
    """Without leaves the ranks' collectives do not match."""
    with pytest.raises(RankError, match=r"RuntimeError|no answer"):
        pools.run(2, worker.run_case, "alone", timeout_s=60)
