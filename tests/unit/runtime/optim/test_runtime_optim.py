"""Schedules, optimizers, gradient norm and loss scaler in one process."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from partool.plan.learning_rate import lr_factor
from partool.spec.training import LrSchedule, OptimizerSpec
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.optim.grad_norm import LocalSums, check_gradients, clip_factor
from partool_runtime.precision import BACKOFF, FIRST_SCALE, GROWTH, GROWTH_INTERVAL, LossScaler

STEPS = 50


def factors(**fields):
    return [lr_factor(LrSchedule(**fields), step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_is_linear_and_reaches_one(kind):
    got = factors(kind=kind, warmup_steps=7)
    assert got[:7] == pytest.approx([(i + 1) / 7 for i in range(7)])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_falls_to_the_minimum_on_the_last_step_and_never_rises(kind):
    got = factors(kind=kind, warmup_steps=7, min_ratio=0.2)
    assert got[-1] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(got[6:]))


def test_shapes_of_the_decay():
    assert factors(kind="constant") == [1.0] * STEPS
    assert lr_factor(LrSchedule(kind="cosine", min_ratio=0.0), 24, STEPS) == pytest.approx(0.5)
    assert lr_factor(LrSchedule(kind="linear", min_ratio=0.0), 24, STEPS) == pytest.approx(0.5)
    wsd = factors(kind="wsd", min_ratio=0.0)
    assert wsd[:40] == [1.0] * 40  # decay over the last fifth
    assert wsd[40] == pytest.approx(0.9)
    assert factors(kind="wsd", min_ratio=0.0, decay_steps=20)[30] == pytest.approx(0.95)


def test_warm_up_longer_than_the_run_does_not_fail():
    assert factors(kind="cosine", warmup_steps=80)[-1] == pytest.approx(50 / 80)


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in {"w": (5, 3), "b": (5,), "g": (1, 7)}.items()
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_adamw_equals_torch_and_decays_only_matrices(dtype, tolerance):
    ours, theirs = parameters(dtype), parameters(dtype)
    spec = OptimizerSpec(lr=0.1, weight_decay=0.3)
    optimizer = DeviceOptimizer(ours, spec)
    groups = [
        {"params": [theirs["w"], theirs["g"]], "weight_decay": 0.3},
        {"params": [theirs["b"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for name in ours:
            gradient = torch.randn(ours[name].shape, generator=generator, dtype=dtype)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient * 0.5
        optimizer.step(0.1, scale=0.5)
        reference.step()
    assert optimizer.updates == 5
    for name in ours:
        torch.testing.assert_close(ours[name].detach(), theirs[name].detach(), rtol=tolerance, atol=tolerance)


def test_missing_gradient_counts_as_zero():
    a, b = parameters(torch.float64), parameters(torch.float64)
    spec = OptimizerSpec(weight_decay=0.3)
    first, second = DeviceOptimizer(a, spec), DeviceOptimizer(b, spec)
    for name in b:
        a[name].grad = None if name == "w" else torch.ones_like(a[name])
        b[name].grad = torch.zeros_like(b[name]) if name == "w" else torch.ones_like(b[name])
    first.step(0.1)
    second.step(0.1)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["w"], parameters(torch.float64)["w"])  # decay continues


def test_state_is_live_and_complete():
    named = parameters(torch.float32)
    optimizer = DeviceOptimizer(named, OptimizerSpec())
    state = optimizer.state()
    assert set(state) == {f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in named}
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1)
    assert torch.all(state["exp_avg.w"] != 0)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())


def test_clip_factor():
    assert clip_factor(2.0, 1.0) == 0.5
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(1e9, 0.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0


def test_loss_scaler_backs_off_and_grows():
    scaler = LossScaler(True)
    scaler.update(finite=False)
    assert scaler.scale == FIRST_SCALE * BACKOFF
    for _ in range(GROWTH_INTERVAL):
        scaler.update(finite=True)
    assert scaler.scale == FIRST_SCALE * BACKOFF * GROWTH
    for _ in range(60):
        scaler.update(finite=False)
    assert scaler.scale == 1.0


def test_loss_scaler_goes_on_where_it_was():
    first = LossScaler(True)
    first.update(finite=False)
    for _ in range(GROWTH_INTERVAL - 1):
        first.update(finite=True)
    second = LossScaler(True)
    second.load(first.state())
    first.update(finite=True)
    second.update(finite=True)
    assert second.scale == first.scale == FIRST_SCALE


def test_loss_scaler_switched_off_is_one():
    scaler = LossScaler(False)
    scaler.update(finite=False)
    assert scaler.scale == 1.0
    assert math.isfinite(scaler.state()["scale"])


def test_flags_travel_with_the_norm() -> None:
    """One all-reduce of all ranks adds norms, losses and flags; here every sum is that of two equal ranks."""
    calls: list[int] = []

    class World:
        def size(self) -> int:
            return 2

    def twice(tensor: torch.Tensor, group: object) -> torch.Tensor:
        calls.append(tensor.numel())
        return tensor.mul_(2)

    pair = SimpleNamespace(size=2)
    ranks: Any = SimpleNamespace(world=World(), tp=pair, replicate=pair)
    sums = LocalSums(torch.tensor(8.0, dtype=torch.float64), torch.tensor(True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partool_runtime.optim.grad_norm.sum_over", twice)
        check = check_gradients(sums, torch.tensor(3.0), ranks, [0.0, 1.0])
        assert check_gradients(sums, torch.tensor(3.0), ranks).flags == ()
    assert (check.norm, check.finite, check.loss_sum, check.flags) == (8.0**0.5, True, 3.0, (0.0, 2.0))
    assert calls == [5, 3]
