"""Exchanges of one bit per element on 1 to 4 ranks: nothing is lost, ranks get equal bits, and as many as planned.

The optimizer's weights are those of the algorithm written out for all ranks in one process.
"""

from __future__ import annotations

import math
from typing import Any

import _one_bit_worker as worker
import pytest
import torch
from _ranks import Pools

from partool.layout.one_bit import CHUNK, ExchangeSchedule
from partool.spec.training import OptimizerSpec

SCHEDULE = ExchangeSchedule(2, freeze_step=7, local_doubling=4, local_most=3, steps=17, periods=(16,))
SPEC = OptimizerSpec(name="zero_one_adam", lr=1e-2, weight_decay=0.2, betas=[0.8, 0.95])
STEPS = 17
KINDS = "F F F o F o F".replace("F", "full").replace("o", "one_bit").split()
"""Two updates of the variance in steps 0 and 1, then two with an interval of 2, then one with an interval of 4."""


def reference(ranks: int) -> list[dict[str, torch.Tensor]]:
    """Return the weights and momenta after each step, by algorithm 1 of arXiv 2202.06009, stacked over the ranks."""
    lr, (beta1, beta2), eps = SPEC.lr, SPEC.betas, SPEC.eps
    history: list[dict[str, torch.Tensor]] = [{} for _ in range(STEPS)]
    for name, start in worker.start().items():
        w = torch.stack([start.flatten()] * ranks)
        decay = SPEC.weight_decay if start.dim() > 1 else 0.0
        m, v = torch.zeros_like(w), torch.zeros_like(w[0])
        move, anchor = torch.zeros_like(w), w.clone()
        worker_error, server_error = torch.zeros_like(w), torch.zeros_like(v)
        rate, shrink, updates = 0.0, 1.0, 0
        for step in range(STEPS):
            kind = SCHEDULE.kind(step)
            g = torch.stack([worker.gradients(rank, step)[name].flatten() for rank in range(ranks)])
            eta = lr / (1.0 - beta1 ** (step + 1))
            if kind == "full":
                updates += 1
                m = beta1 * m + (1.0 - beta1) * g.mean(0)
                v = beta2 * v + (1.0 - beta2) * g.mean(0) ** 2
                w = w * (1.0 - lr * decay) - eta * m / (torch.sqrt(v / (1.0 - beta2**updates)) + eps)
                anchor = w.clone()
            else:
                m = beta1 * m + (1.0 - beta1) * g
                d = torch.where(v == 0.0, math.inf, torch.sqrt(v / (1.0 - beta2**updates)) + eps)
                move, rate, shrink = move + eta * m, rate + eta, shrink * (1.0 - lr * decay)
                if kind == "local":
                    w = w * (1.0 - lr * decay) - eta * m / d
                else:
                    move = torch.where(v == 0.0, 0.0, move)
                    sent, worker_error = _signs(move + worker_error)
                    mean, server_error = _signs((sent.mean(0) + server_error)[None])
                    if ranks == 1:
                        mean, worker_error, server_error = move, torch.zeros_like(w), torch.zeros_like(v)
                    w = (anchor * shrink - mean[0] / d).expand_as(w).clone()
                    m = torch.where(v == 0.0, 0.0, mean[0] / rate).expand_as(w).clone()
                    anchor, move, rate, shrink = w.clone(), torch.zeros_like(w), 0.0, 1.0
                    server_error = server_error.reshape(v.shape)
            history[step] |= {name: w.view(ranks, *start.shape), f"exp_avg.{name}": m.view(ranks, *start.shape)}
    return history


def _signs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return signs times the mean magnitude of each chunk of the last dimension, and what they lack."""
    parts = [part.abs().mean(-1, keepdim=True) * torch.where(part >= 0, 1.0, -1.0) for part in values.split(CHUNK, -1)]
    sent = torch.cat(parts, -1)
    return sent, values - sent


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.long), 4])
def found(request: pytest.FixtureRequest, pools: Pools) -> tuple[int, list[dict[str, Any]]]:
    ranks = request.param
    return ranks, pools.run(ranks, worker.everything, SPEC, SCHEDULE, STEPS)


def test_schedule_of_the_test_has_all_kinds() -> None:
    assert [SCHEDULE.kind(step) for step in range(7)] == KINDS
    later = [SCHEDULE.kind(step) for step in range(7, STEPS)]
    assert later == ["one_bit"] * 4 + ["local", "one_bit"] * 2 + ["one_bit"] * 2


@pytest.mark.timeout(120)
def test_what_is_sent_and_what_is_kept_are_what_was_given(found: tuple[int, list[dict[str, Any]]]) -> None:
    ranks, answers = found
    means = [answer["mean"] for answer in answers]
    given = torch.stack([each["given"] for each in means]).mean(0)
    kept = torch.stack([each["worker"] for each in means]).mean(0) + sum(each["server"] for each in means)
    assert torch.allclose(means[0]["got"] + kept, given, rtol=0.0, atol=1e-12)
    if ranks > 1:
        assert float(kept.abs().max()) > 0.1  # without the errors the sums differ
    for each in means:
        assert all(torch.equal(a, b) for a, b in zip(each["results"], means[0]["results"], strict=True))
        assert each["sent_bytes"] == each["planned_bytes"]


@pytest.mark.timeout(120)
def test_weights_are_those_of_the_algorithm(found: tuple[int, list[dict[str, Any]]]) -> None:
    ranks, answers = found
    for step, expected in enumerate(reference(ranks)):
        for name, values in expected.items():
            got = torch.stack([answer["trained"][step][name] for answer in answers])
            assert torch.allclose(got, values, rtol=1e-11, atol=1e-12), (step, name)
            same = all(torch.equal(each, got[0]) for each in got)
            assert same == (ranks == 1 or SCHEDULE.kind(step) != "local"), (step, name)
    first_row = [answer["trained"][-1]["d"][0] for answer in answers]
    decayed = worker.start()["d"][0] * (1.0 - SPEC.lr * SPEC.weight_decay) ** STEPS
    assert all(torch.allclose(row, decayed, rtol=1e-12) for row in first_row)  # always zero gradients move nothing
