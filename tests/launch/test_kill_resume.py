"""A run whose ranks are killed at random points, also inside checkpoint writes, ends like an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch_helpers import HERE, trainable_plan
from layouts import laid
from patience import PATIENCE

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.training import CheckpointSpec
from partool_runtime.checkpoint import load_folder, newest_step, step_folder, tensor_shapes

STEPS = 24
LOW_PRECISION = "test_low_precision_stays_near_and_the_comparison_can_fail"


def plan_of(folder: Path, precision: str = "fp32", *, ranks: int = 2, zero: int = 2) -> Plan:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
    plan = trainable_plan(text, STEPS)
    training = plan.training.model_copy(update={"precision": precision, "global_batch": 6})
    layout = laid(plan.layout, mesh=Mesh(dp_shard=ranks), zero=zero, micro_batch=1, accumulation=6 // ranks)
    devices = plan.devices.model_copy(update={"per_node": ranks})
    checkpoint = CheckpointSpec(every=3, keep=2)
    return plan.model_copy(
        update={"training": training, "layout": layout, "checkpoint": checkpoint, "devices": devices}
    )


def killer(
    folder: Path, *cases: tuple[str, Plan, int], resume: bool = False, timeout_s: float = 150
) -> list[dict[str, float]]:
    """Run each case (folder name, plan, kills) to its end and return the counts."""
    described = []
    for seed, (name, plan, kills) in enumerate(cases):
        file = folder / f"{name}.json"
        file.write_text(plan.to_json())
        described.append(
            {"plan": str(file), "run_dir": str(folder / name), "kills": kills, "seed": seed, "resume": resume}
        )
    command = [sys.executable, str(HERE / "_killer.py"), json.dumps(described)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s * PATIENCE, start_new_session=True
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def final_state(run_dir: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    folder = run_dir / "checkpoints"
    assert newest_step(folder) == STEPS
    path = step_folder(folder, STEPS)
    state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensor_shapes(path).items()}
    return state, load_folder(path, state)


def assert_same_end(a: Path, b: Path) -> None:
    (state_a, extra_a), (state_b, extra_b) = final_state(a), final_state(b)
    assert extra_a == extra_b
    assert state_a.keys() == state_b.keys()
    assert any(name.startswith("exp_avg_sq.") for name in state_a)
    for name, value in state_a.items():
        assert value.view(torch.uint8).equal(state_b[name].view(torch.uint8)), name


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of every step that rank 0 recorded; a step that was repeated must have the same loss."""
    found: dict[int, float] = {}
    for line in (run_dir / "events" / "rank-0.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            step, loss = event["data"]["step"], event["data"]["loss"]
            assert found.setdefault(step, loss) == loss, f"step {step} has two losses"
    return found


def assert_killed(counts: dict[str, float], kills: int) -> None:
    assert counts["kills"] == kills
    assert counts["in_write"] == kills // 2
    assert counts["attempts"] == kills + 1


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Run what the selected tests need once, in one process that has imported what the ranks need."""
    selected = {item.name for item in request.session.items if item.module is request.module}
    folder = tmp_path_factory.mktemp("runs")
    cases = [("fp32", plan_of(folder), 0), ("fp32-killed", plan_of(folder), 2)]
    for precision, zero in (("bf16", 3), ("fp16", 1)):
        if not selected & {f"test_kills_change_no_bit[{precision}]", LOW_PRECISION}:
            continue
        plan = plan_of(folder, precision, zero=zero)
        cases += [(precision, plan, 0), (f"{precision}-killed", plan, 2)]
    counts = killer(folder, *cases)
    print({name: count["seconds"] for (name, _, _), count in zip(cases, counts, strict=True)})
    return folder, {name: (kills, count) for (name, _, kills), count in zip(cases, counts, strict=True)}


@pytest.mark.timeout(170)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_kills_change_no_bit(runs, precision):
    folder, counts = runs
    kills, count = counts[f"{precision}-killed"]
    assert_killed(count, kills)
    assert_same_end(folder / precision, folder / f"{precision}-killed")
    assert losses(folder / precision) == losses(folder / f"{precision}-killed")
    leftovers = [entry.name for entry in (folder / f"{precision}-killed" / "checkpoints").iterdir()]
    assert sorted(leftovers) == [".lock", f"step-{STEPS - 3:08}", f"step-{STEPS:08}"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_twenty_kills_change_no_bit(runs):
    folder, _ = runs
    (count,) = killer(folder, ("fp32-often", plan_of(folder), 20), timeout_s=350)
    assert_killed(count, 20)
    assert_same_end(folder / "fp32", folder / "fp32-often")
    assert losses(folder / "fp32") == losses(folder / "fp32-often")


def test_low_precision_stays_near_and_the_comparison_can_fail(runs):
    folder, _ = runs
    with pytest.raises(AssertionError):
        assert_same_end(folder / "fp32", folder / "bf16")
    for precision in ("bf16", "fp16"):
        assert losses(folder / precision)[STEPS] == pytest.approx(losses(folder / "fp32")[STEPS], rel=0.02)


@pytest.mark.timeout(170)
def test_another_number_of_ranks_and_another_stage_go_on_from_a_killed_run(runs):
    folder, _ = runs
    cases = [("three", plan_of(folder, ranks=3, zero=3), 0), ("one", plan_of(folder, ranks=1, zero=0), 0)]
    for name, _, _ in cases:
        shutil.copytree(folder / "fp32-killed", folder / name)
        shutil.rmtree(step_folder(folder / name / "checkpoints", STEPS))
        shutil.rmtree(folder / name / "events")
    killer(folder, *cases, resume=True)
    for name in ("three", "one"):
        found, expected = losses(folder / name), losses(folder / "fp32")
        assert sorted(found) == [STEPS - 2, STEPS - 1, STEPS]
        assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)
        state, want = final_state(folder / name)[0], final_state(folder / "fp32")[0]
        for tensor, value in want.items():
            assert torch.allclose(state[tensor], value, rtol=1e-3, atol=1e-6), tensor


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_many_kills_in_every_stage(tmp_path, precision, zero):
    plan = plan_of(tmp_path, precision, zero=zero)
    counts = killer(tmp_path, ("unbroken", plan, 0), ("broken", plan, 40), timeout_s=800)
    assert_killed(counts[1], 40)
    assert_same_end(tmp_path / "unbroken", tmp_path / "broken")
