"""The whole trainer with fused parts over every kind of parallelism, against one process without them, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _sequence_plans import sequence_plan
from _tensor_plans import HALVES, ONE, QUARTERS
from often import chosen, often

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool_runtime.fused.apply import PARTS

STEPS = 3
ALL = (*PARTS, "adamw")
SETTINGS = {"steps": STEPS, "checkpoint": {"every": STEPS}}
ZIGZAG = {"order": "zigzag"}
GATED = {"gather": "sequential", "prefetch": 2, "persistent": 40}


@cache
def cases(text: Path, *, every: bool = False) -> dict[str, tuple[Plan, str]]:
    """Return plans of four ranks that fuse all they can, each with the model of the run that it must equal."""

    def case(model: str, mesh: Mesh, method: str = "ulysses", zero: int = 1, **fields: Any) -> tuple[Plan, str]:
        return sequence_plan(
            text, mesh, method, model=model, settings=SETTINGS | {"zero": zero}, fused=ALL, **fields
        ), model

    found = {
        "sharded": case("grouped", Mesh(dp_shard=4), zero=3, recompute="selective", **GATED),
        "tensor shares": case("grouped", Mesh(tp=2, cp=2), sequence_norms=True, recompute="attention"),
        "two dimensions": case("even", Mesh(tp=4), tensor_inner=2),
        "ring": case("grouped", Mesh(cp=4), "ring", zero=2, recompute="keep_attention", **ZIGZAG),
        "halves of passes": case("grouped", Mesh(pp=2, tp=2), schedule="zb-v", stages=QUARTERS),
        "weights on the move": case(
            "grouped", Mesh(pp=4), zero=0, schedule="weipipe", stages=QUARTERS, micro_batches=4, recompute="full"
        ),
    }
    if every:
        for policy in ("none", "attention", "selective", "keep_attention", "full"):
            found[f"sharded {policy} compiled"] = case(
                "grouped", Mesh(dp_shard=4), zero=3, recompute=policy, compile="block"
            )
            found[f"tensor {policy} tiles"] = case("grouped", Mesh(tp=4), recompute=policy, mlp_tile_tokens=5)
        for schedule, stages in {"1f1b": HALVES, "zb-h1": HALVES, "hanayo": QUARTERS}.items():
            found[schedule] = case("five", Mesh(pp=2, cp=2), "ring", schedule=schedule, stages=stages, **ZIGZAG)
        for method, own in {
            "usp": {"inner": 2, **ZIGZAG},
            "startrail": {"teams": 2, **ZIGZAG},
            "all_gather": {},
        }.items():
            found[method] = case("grouped", Mesh(cp=4), method, **own)
        found["units of their own"] = case("grouped", Mesh(dp_shard=4), zero=3, leaves=("layers.*.attention.q_norm",))
        found["tensor replicas"] = case("grouped", Mesh(tp=2, dp_replicate=2), zero=0, tensor_overlap="backward")
    return found


def assert_equal(jobs: Jobs, name: str, reference: str) -> None:
    for rank in range(4):
        assert jobs.ended(name, rank) == "done", name
    wanted, got = (jobs.state(run, step=STEPS) for run in (f"reference {reference}", f"case {name}"))
    assert wanted.keys() == got.keys()
    for key, expected in wanted.items():
        limit = 1e-10 * max(1.0, float(expected.abs().max()))
        assert float((got[key] - expected).abs().max()) <= limit, f"{name}: {key} differs"
    losses = [[step["loss"] for step in jobs.events(run, "step")] for run in (f"reference {reference}", f"case {name}")]
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def launch(pools: Pools, folder: Path, found: dict[str, tuple[Plan, str]]) -> Jobs:
    jobs, text = Jobs(folder, pools), folder / "text"
    for name, (case, _) in found.items():
        jobs.train(name, case, run=f"case {name}")
    for model in {model for _, model in found.values()}:
        jobs.train(
            f"reference {model}", sequence_plan(text, ONE, model=model, settings=SETTINGS), run=f"reference {model}"
        )
    return jobs


OFTEN = ("sharded", "tensor shares", "ring", "halves of passes")
"""Cases that run each time."""


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text")
    every = cases(folder / "text")
    return launch(pools, folder, chosen(request, every) | {"ring": every["ring"]})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", often(cases(Path()), OFTEN))
def test_fused_parts_change_nothing(ran: Jobs, name: str) -> None:
    assert_equal(ran, name, cases(ran.folder / "text")[name][1])


@pytest.mark.timeout(300)
def test_comparison_can_fail(ran: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ran.state

    def state(run: str, step: int) -> dict[str, torch.Tensor]:
        found = right(run, step)
        if run == "case ring":
            found["model.layers.3.attention.q_norm.weight"][0] += 1e-8
        return found

    monkeypatch.setattr(ran, "state", state)
    with pytest.raises(AssertionError, match=r"ring: model\.layers\.3\.attention\.q_norm\.weight differs"):
        assert_equal(ran, "ring", "grouped")


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_fused_parts_change_nothing_anywhere(pools: Pools, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    found = cases(tmp_path / "text", every=True)
    jobs = launch(pools, tmp_path, found)
    for name, (_, model) in found.items():
        assert_equal(jobs, name, model)
