"""Dry runs for GPUs on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from _dry_traces import Recorded, recorded
from planned import plan_of

from partool.layout.parameters import count, parameters
from partool.plan.rank_trace import RankTrace
from partool.plan.types import Plan
from partool.spec.objective import ObjectiveSpec

SPEC = """\
model: {hidden: 64, layers: 4, heads: 4, kv_heads: 2, vocab: 256, ffn_hidden: 96, tied_embeddings: true}
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 4}
data: python-stdlib
training: {global_batch: 8, sequence_length: 64, steps: 3}
parallel: {tensor: 2, sequence: 1, pipeline: {stages: 2, schedule: interleaved}, data: {zero: 2},
           compile: none, micro_batch: 1, recompute: none, offload: none}
"""
RING = (
    "{tensor: 1, sequence: 1, pipeline: {stages: 4, schedule: weipipe}, compile: none, micro_batch: 1, recompute: full}"
)
GRID = "tied_embeddings: true, attention: {grid: [8, 8], layer_types: {pattern: [row, column]}}"
OFFLOADED = (
    "{micro_batch: 2, tensor: 1, sequence: 1, pipeline: 1, recompute: full, compile: none, offload: {activations: cpu}}"
)
DSP = "{tensor: 1, pipeline: 1, sequence: {degree: 4, method: dsp}, compile: none, micro_batch: 1, recompute: none}"


def with_parallel(parallel: str) -> str:
    """Return the spec for one node, with another section ``parallel``."""
    return SPEC.replace("nodes: 2, ", "").replace(SPEC[SPEC.index("{tensor") :], parallel)


PERTURBED = with_parallel("{tensor: 1, sequence: 1, pipeline: 1, data: {zero: 3}, micro_batch: 1, compile: none}")


@pytest.fixture(scope="module")
def small(request: pytest.FixtureRequest) -> dict[str, Recorded]:
    """Plans and the traces of all their ranks, from one process; the longer suites look at more of them."""
    every = {
        "ring": with_parallel(RING),
        "grid": with_parallel(DSP).replace("tied_embeddings: true", GRID),
        "plain": PERTURBED,
        "perturbed": PERTURBED.replace("steps: 3", "steps: 3, adversarial: {epsilon: 0.1, start_step: 1}"),
        "offloaded": with_parallel(OFFLOADED).replace("per_node: 4", "per_node: 1").replace("h: 64", "h: 8192"),
    }
    more = any(item.get_closest_marker("long") for item in request.session.items if item.path == request.path)
    return recorded(every if more else {"offloaded": every["offloaded"]})


@pytest.mark.long
def test_perturbed_embeddings_only_gather_more(small: dict[str, Recorded]) -> None:
    """With ZeRO-3 each pass has its gathers twice; nothing else is exchanged."""
    counts = [Counter(each[0] for each in small[name][1][0].collectives) for name in ("plain", "perturbed")]
    more = counts[1] - counts[0]
    assert not counts[0] - counts[1]
    assert set(more) == {"_allgather_base_"}
    assert more["_allgather_base_"] == counts[0]["_allgather_base_"]


def dry(plan: Plan, folder: Path, *ranks: int, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """Dry-run ranks of a plan in a process of its own; return the exit code and the lines."""
    (folder / "plan.json").write_text(plan.to_json())
    command = [sys.executable, "-m", "partool_runtime.dry", str(folder / "plan.json"), *map(str, ranks)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=100)
    assert done.stdout, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, [_with_collectives(line) if "order" in line else line for line in lines]


def _with_collectives(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"collectives": list(RankTrace.model_validate_json(json.dumps(line)).collectives)}


@pytest.mark.timeout(120)
def test_ranks_of_a_gpu_plan_agree_on_what_they_exchange(tmp_path: Path) -> None:
    """Both pipeline ranks of tensor rank 0 and one neighbour: messages have a receiver, collectives equal partners."""
    code, traces = dry(plan_of(SPEC), tmp_path, 0, 1, 4, PARTOOL_HOME=str(tmp_path))
    assert code == 0
    first, beside, last = ([tuple(map(str, each)) for each in trace["collectives"]] for trace in traces)
    shared = str((0, 1))
    assert [each for each in first if each[1] == shared] == [each for each in beside if each[1] == shared] != []
    for sender, receiver, peer in ((first, last, "0"), (last, first, "4")):
        sent = [each[3:5] for each in sender if each[0] == "send"]
        assert sent == [each[3:5] for each in receiver if each[0] == "recv_" and each[5] == peer] != []
    assert {each[2].partition(" ")[0] for each in first if each[0] == "send"} == {"pipeline"}
    assert list((tmp_path / "dry").glob("shim-*.so")), "the library is kept"


def test_offloaded_activations_leave_the_device(small: dict[str, Recorded]) -> None:
    """Of four layers' inputs of 2 MiB, those of at most two layers are on the device, and none after the step."""
    ((trace, *_),) = small["offloaded"][1:]
    assert trace.memory is not None
    assert (trace.memory.leaked_bytes, trace.memory.leaked) == (0, ())
    inputs = [owner for owner in trace.memory.owners if owner.operator in ("aten::add", "aten::embedding")]
    assert sum(owner.size_bytes for owner in inputs) <= 3 * 2**21


@pytest.mark.timeout(60)
def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    code, (answer,) = dry(plan_of(SPEC), tmp_path, 0, PARTOOL_HOME=str(tmp_path), CXX="/nowhere/c++")
    assert (code, answer["code"]) == (2, "PT516")
    assert answer["message"].startswith("/nowhere/c++ does not start")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_weights_that_travel_round_a_ring_of_gpus(small: dict[str, Recorded]) -> None:
    """What the ranks of a ring send is what their neighbours receive."""
    ranks = [[each for each in trace.collectives if each[0] in ("send", "recv_")] for trace in small["ring"][1]]
    for sender, mine in enumerate(ranks):
        for receiver, theirs in enumerate(ranks):
            for purpose in ("relay", "deal", "gradients", "home"):
                name = f"weipipe {purpose}"
                sent = [each[3:5] for each in mine if (each[0], each[2], each[5]) == ("send", name, receiver)]
                got = [each[3:5] for each in theirs if (each[0], each[2], each[5]) == ("recv_", name, sender)]
                assert sent == got, (sender, receiver, purpose)
    assert all(ranks)


@pytest.mark.timeout(60)
def test_input_that_cannot_be_dry_run_is_named(tmp_path: Path) -> None:
    assert dry(plan_of(SPEC), tmp_path, 8)[1][0]["message"] == "the plan has no rank 8"
    (tmp_path / "plan.json").write_text("{}")
    command = [sys.executable, "-m", "partool_runtime.dry", str(tmp_path / "plan.json"), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, json.loads(done.stdout)["code"]) == (2, "PT503")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_layers_along_rows_and_columns_of_a_grid(small: dict[str, Recorded]) -> None:
    """The indices of the tokens that travel are read by the host, and used on a device that does not exist."""
    turns = [[each for each in trace.collectives if each[2] == "sequence_parallel"] for trace in small["grid"][1]]
    assert turns[0]
    assert len({len(mine) for mine in turns}) == 1


@pytest.mark.long
@pytest.mark.timeout(120)
def test_references_and_adapters_take_the_memory_of_the_plan(tmp_path: Path) -> None:
    """A copy in bf16 beside the masters; the model without its adapter needs none, and runs as a part of the step."""
    one = with_parallel("{tensor: 2, sequence: 1, pipeline: 1, data: {zero: 3}, micro_batch: 2, compile: none}")
    for reference, more in (("copy", ""), ("adapter_off", "adapter: {rank: 4}\n")):
        plan = plan_of(f"{more}{one}\nkernels: {{fused: []}}\n")
        objective = ObjectiveSpec(kind="dpo", reference=reference)
        update = {
            "training": plan.training.model_copy(update={"objective": objective}),
            "data": plan.data.model_copy(update={"attend": "document", "records": "preference"}),
        }
        code, [trace] = dry(plan.model_copy(update=update), tmp_path, 0, PARTOOL_HOME=str(tmp_path))
        assert code == 0, trace
        added = count(parameters(plan.model)) if reference == "copy" else 0  # of 2 bytes, on 2 · 2 ranks
        want = plan.prediction.memory.terms_bytes["parameters"] + added / 2
        assert trace["memory"]["terms_bytes"]["parameters"] == pytest.approx(
            want, rel=0.06
        )  # norms are on both tensor ranks
