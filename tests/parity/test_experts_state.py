"""The training state of layers of experts: its bytes on each rank, and runs that are killed and go on elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import _experts_state_worker as worker
import pytest
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import ONE, QUARTERS, tensor_plan
from _trainer_worker import train_and_die
from test_experts import PYRAMID
from test_tensor_trainer import assert_same_state

from partool.layout.mesh import shard_rows
from partool.layout.parameters import is_selection_bias, parameters
from partool.plan.layout import Mesh
from partool.plan.types import Plan

WIDE = 8
"""Bytes of an element in float64."""
MESHES = {
    "one copy": (Mesh(dp_shard=4), 2),
    "experts on all ranks": (Mesh(dp_shard=4), 4),
    "two copies": (Mesh(dp_replicate=2, dp_shard=2), 2),
}
"""Meshes, and the ranks that share experts."""


def expected_bytes(plan: Plan, rank: int) -> dict[str, tuple[int, int]]:
    """Return what the sharding says that :func:`worker.held_bytes` counts on a rank."""
    mesh, ep, zero = plan.layout.mesh, plan.layout.expert, plan.layout.data.zero
    place = rank % mesh.dp_shard
    whole, shards, padded, sums, biases = [0, 0], [0, 0], [0, 0], [0, 0], 0
    for each in parameters(plan.model):
        if is_selection_bias(each.name):
            biases += WIDE * math.prod(each.shape)
            continue
        dense = ".moe.experts." not in each.name
        rows, ranks, at = (each.shape[0], mesh.dp_shard, place) if dense else (
            each.shape[0] // ep, mesh.dp_shard // ep, place // ep
        )  # fmt: skip
        columns_bytes = WIDE * math.prod(each.shape[1:])
        start, stop = shard_rows(rows, ranks, at)
        whole[dense] += rows * columns_bytes
        shards[dense] += (stop - start) * columns_bytes
        most = math.ceil(rows / ranks)
        padded[dense] += most * ranks * columns_bytes
        # Sums that copies have yet to add up are padded, too.
        sums[dense] += (most if mesh.dp_replicate > 1 else stop - start) * columns_bytes
    return {
        "parameters": (shards[0], shards[1] + biases),
        "moments": (2 * shards[0], 2 * shards[1]),
        "gradients": (whole[0], whole[1]) if zero == 1 else (sums[0], sums[1]),
        # A rank that shares its experts with no other computes with the experts' masters.
        "gathered": (0, 0) if zero == 3 else (padded[0] if mesh.dp_shard > ep else 0, padded[1]),
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "zero"),
    [("one copy", 1), ("one copy", 2), ("one copy", 3), ("experts on all ranks", 3), ("two copies", 2)],
)
def test_each_rank_holds_the_bytes_that_its_shards_have(pools: Pools, name: str, zero: int) -> None:
    mesh, expert = MESHES[name]
    plan = tensor_plan(Path("text"), mesh, model=PYRAMID, expert=expert, settings={"zero": zero})
    counted = pools.run(4, worker.held_bytes, plan.to_json())
    assert counted == [expected_bytes(plan, rank) for rank in range(4)]


@pytest.mark.timeout(170)
def test_a_killed_run_goes_on_in_another_layout(pools: Pools, tmp_path: Path) -> None:
    """Both ranks are killed without a warning; four ranks go on with a pipeline, and then one rank alone."""
    text = tmp_path / "text"
    write_text(text)

    def plan(steps: int, mesh: Mesh, **fields: Any) -> Plan:
        zero = {"settings": {"steps": steps, "zero": fields.pop("zero", 1)}}
        return tensor_plan(text, mesh, model=PYRAMID, **zero, **fields)

    killed = plan(5000, Mesh(dp_shard=2), expert=2, zero=3)
    pools.run(2, train_and_die, killed.to_json(), tmp_path / "broken", lost=[0, 1])
    saved = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "broken/checkpoints").glob("step-*[0-9]"))
    assert saved >= 4
    jobs = Jobs(tmp_path, pools)
    piped = plan(saved + 1, Mesh(dp_shard=2, pp=2), expert=1, zero=2, schedule="zb-v", stages=QUARTERS)
    shared = plan(saved + 2, Mesh(dp_shard=2, tp=2), expert=4, sequence_norms=True)
    for name, layout in (("piped", piped), ("shared", shared)):
        jobs.train(name, layout, run="broken", resume=True)
    jobs.train("unbroken", plan(saved + 2, ONE), run="unbroken")
    assert [jobs.ended(name) for name in ("piped", "shared", "unbroken")] == ["done"] * 3
    assert [event["resumed_from"] for event in jobs.events("broken", "start")] == [0, saved, saved + 1]
    assert_same_state(jobs, "broken", "unbroken", at=saved + 2, of=saved + 2)
