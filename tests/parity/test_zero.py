"""ZeRO stages, hybrid sharding, accumulation, recomputation and precisions against one process in float64."""

from __future__ import annotations

import functools
import math
from itertools import product
from typing import Any

import _zero_worker as worker
import pytest
import torch
from _ranks import Pools, Results
from often import often
from torch.nn.utils import clip_grad_norm_

from partool.plan.learning_rate import lr_factor

ELEMENT_BYTES = 8
GROUPS = worker.LAYERS + 2


@functools.cache
def reference(
    *, tied: bool = False, frozen: tuple[str, ...] = (), skip: int = -1, decay_vectors: bool = False
) -> dict[str, Any]:
    """Train on whole batches in this process, with torch's own optimizer and clipping."""
    model = worker.Model(tied=tied).double()
    weights = worker.initial_weights(tied)
    model.load_state_dict(weights, strict=not tied)
    named = {n: p.requires_grad_(n not in frozen) for n, p in model.named_parameters()}
    trained = [p for p in named.values() if p.requires_grad]
    spec = worker.OPTIMIZER
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": spec.weight_decay * decay_vectors},
    ]
    optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=(0.9, 0.95), eps=spec.eps, foreach=False)
    out: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(worker.STEPS):
        tokens, labels = worker.samples(step)
        optimizer.zero_grad()
        loss = model(tokens, labels) / (labels != -100).sum()
        loss.backward()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        out["losses"].append(float(loss.detach()))
        out["norms"].append(float(clip_grad_norm_(trained, math.inf)))
        if step == skip:
            continue
        torch._foreach_mul_([p.grad for p in trained], min(1.0, spec.clip / out["norms"][-1]))
        for group in optimizer.param_groups:
            group["lr"] = spec.lr * lr_factor(spec.schedule, step, worker.STEPS)
        optimizer.step()
    tokens, labels = worker.samples(99)
    with torch.no_grad():
        out["validation"] = float(model(tokens, labels) / (labels != -100).sum())
    out["weights"] = {n: p.detach() for n, p in named.items()}
    return out


def assert_same_weights(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        difference = float((got[name] - expected).abs().max())
        assert difference <= 1e-12 * max(1.0, float(expected.abs().max())), f"{name} differs by {difference}"


def assert_same_run(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert_same_weights(got["weights"], want["weights"])
    assert got["losses"] == pytest.approx(want["losses"], abs=1e-12)
    assert got["norms"] == pytest.approx(want["norms"], abs=1e-12)
    assert got["validation"][0] == pytest.approx(want["validation"], abs=1e-12)


@pytest.fixture(scope="module")
def two(pools: Pools) -> Results:
    return Results(pools, 2, worker.run_case)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return reference()


FROZEN = worker.cases(2)["zero-0 frozen"].frozen


def test_reference_clips_in_some_steps_and_learns(plain):
    clipped = [norm > worker.OPTIMIZER.clip for norm in plain["norms"]]
    assert any(clipped)
    assert not all(clipped)
    assert plain["losses"][-1] < plain["losses"][0]


def test_comparison_can_fail(plain):
    other = reference(decay_vectors=True)
    with pytest.raises(AssertionError, match="differs"):
        assert_same_weights(other["weights"], plain["weights"])


@pytest.mark.timeout(170)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", often(["", " k=3"], [" k=3"]))
def test_two_ranks_equal_one_process(two, plain, zero, kind):
    assert_same_run(two[f"zero-{zero}{kind}"], plain)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", often(worker.cases(3), ["zero-0", "zero-2 k=2", "zero-3"]))
def test_three_ranks_equal_one_process(pools, plain, name):
    assert_same_run(pools.run(3, worker.run_case, name)[0], plain)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", often(worker.cases(4), ["hybrid zero-3"]))
def test_hybrid_sharding_equals_one_process(pools, plain, name):
    result = pools.run(4, worker.run_case, name)[0]
    assert_same_run(result, plain)
    reductions = GROUPS if "zero-1" in name else 3 * GROUPS
    assert result["calls"]["reduce_scatter"] == reductions
    assert result["calls"]["all_reduce"] == GROUPS + 2  # one per group, token count, gradient norm


@pytest.mark.timeout(170)
@pytest.mark.parametrize("zero", [1, 2])
def test_copies_of_whole_shards_are_summed_once_a_step(two, plain, zero):
    result = two[f"zero-{zero} copies"]
    assert_same_run(result, plain)
    assert result["calls"] == {"all_reduce": GROUPS + 2}  # token count, gradient norm


@pytest.mark.timeout(170)
def test_the_last_sum_is_in_flight_where_the_backward_pass_ends(two):
    """But for ZeRO-2 and 3 behind the first micro-batch, whose sums are added to those before."""
    assert [two[f"zero-{zero} k=3"]["in_flight"] for zero in range(4)] == [1, 1, 0, 0]


@pytest.mark.timeout(170)
@pytest.mark.parametrize("zero", often(range(4), [1, 3]))
def test_frozen_parameters_stay_and_have_no_moments(two, zero):
    result = two[f"zero-{zero} frozen"]
    assert_same_run(result, reference(frozen=FROZEN))
    for name in FROZEN:
        assert torch.equal(result["weights"][name], worker.initial_weights(False)[name])
        assert f"exp_avg.{name}" not in result["exp_avg"]


@pytest.mark.timeout(170)
@pytest.mark.parametrize("zero", often(range(4), [0, 3]))
def test_tied_embeddings(two, zero):
    result = two[f"zero-{zero} tied"]
    assert "head.weight" not in result["weights"]
    assert_same_run(result, reference(tied=True))


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("zero", "policy"),
    often(product((1, 3), ("attention", "selective", "full")), [(1, "selective"), (3, "full")]),
)
def test_recomputation_changes_nothing(two, zero, policy):
    kept, again = two[f"zero-{zero} k=3"], two[f"zero-{zero} {policy}"]
    assert_same_weights(again["weights"], kept["weights"])
    assert again["calls"] == kept["calls"]


@pytest.mark.timeout(170)
@pytest.mark.parametrize("zero", [0, 2])
def test_step_with_infinity_on_one_rank_is_skipped_on_all(two, zero):
    result = two[f"zero-{zero} poisoned"]
    assert result["skipped"] == [step == 4 for step in range(worker.STEPS)]
    assert math.isnan(result["norms"][4])
    assert_same_weights(result["weights"], reference(skip=4)["weights"])


@pytest.mark.timeout(170)
def test_stages_differ_in_their_collectives(two):
    """Three micro-batches; of the groups the root's stays gathered from forward to backward."""
    calls = {zero: two[f"zero-{zero} k=3"]["calls"] for zero in range(4)}
    own = 2  # token count, gradient norm with the loss
    assert calls[0] == {"all_reduce": GROUPS + own}
    assert calls[1] == {"all_reduce": own, "all_gather": GROUPS, "reduce_scatter": GROUPS}
    assert calls[2] == {"all_reduce": own, "all_gather": GROUPS, "reduce_scatter": 3 * GROUPS}
    assert calls[3] == {"all_reduce": own, "all_gather": 3 * (2 * GROUPS - 1), "reduce_scatter": 3 * GROUPS}
    gathered = {zero: two[f"zero-{zero} k=3"]["payload_bytes"].get("all_gather", 0) for zero in range(4)}
    assert gathered[0] == 0
    assert gathered[1] == gathered[2] < gathered[3]


@pytest.mark.timeout(170)
def test_stages_differ_in_live_bytes(two):
    live = {zero: two[f"zero-{zero} k=3"]["live"] for zero in range(4)}
    sizes = {name: t.numel() for name, t in worker.initial_weights(False).items()}
    whole = sum(n for name, n in sizes.items() if "unused" not in name) * ELEMENT_BYTES
    between = {zero: live[zero]["gradients"][0] for zero in range(4)}
    assert between[0] == between[1] == whole
    assert between[2] == between[3] < 0.65 * whole  # half, and the padding of odd sizes
    assert live[1]["gradients"][-1] == live[2]["gradients"][-1] == between[2]
    everything = sum(sizes.values()) * ELEMENT_BYTES
    for zero in (1, 2):
        assert live[zero]["gathered"][0] == live[zero]["gathered"][1] >= everything
    assert live[0]["gathered"] == [0, 0, 0]
    assert live[0]["in_forward"] == 0
    assert [live[zero]["gathered"][-1] for zero in (1, 2, 3)] == [0, 0, 0]
    assert live[3]["gathered"][:2] == [0, 0]
    assert live[3]["in_forward"] < 0.3 * everything


@pytest.mark.timeout(170)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_losses_of_lower_precision_are_near(two, plain, zero, precision, tolerance):
    losses = two[f"zero-{zero} {precision}"]["losses"]
    assert losses == pytest.approx(plain["losses"], abs=tolerance)
    assert losses != plain["losses"]
    assert all(t.dtype == torch.float32 for t in two[f"zero-{zero} {precision}"]["weights"].values())


@pytest.mark.long
@pytest.mark.timeout(170)
def test_compiled_blocks_equal_one_process(two, plain):
    assert_same_run(two["compiled"], plain)
