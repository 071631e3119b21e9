"""The planner's memory terms against those of dry runs, moment by moment."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from planned import FOLDER

from partool.cost.training.moments import VARYING, Moment
from partool.cost.training.peak import rank_moments
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.planner.cost_job import cost_job
from partool.planner.elastic import job_of_plan
from partool.planner.resolve import resolve
from partool.spec import load_text

WORKER = Path(__file__).parents[2] / "_dry_terms.py"
SPECS = Path(__file__).parents[4] / "specs"
SHARE, LEAST_BYTES = 0.03, 2**20
"""Two figures agree if they differ by at most this share of the larger one, or by at most these bytes."""
MOST_PLANNED = 1.1
"""Most planned bytes of a model whose experts differ by layer, as a multiple of those executed."""
REFUSED = {}
"""Specs whose plan the runtime refuses, and the finding."""
MECHANISMS: dict[str, tuple[Any, ...]] = {
    "data": (*({"zero": zero} for zero in range(4)), {"zero": 3, "gather": "sequential"}, {"zero": 3, "prefetch": 0}),
    "tensor": (1, 1, 1, {"degree": 2, "sequence_norms": False}, {"degree": 2, "sequence_norms": True}),
    "pipeline": (1, 1, 1, {"stages": 2, "schedule": "1f1b"}, {"stages": 2, "schedule": "interleaved"}),
    "sequence": (1, 1, 1, {"degree": 2, "method": "ulysses"}, {"degree": 2, "method": "ring"}),
    "recompute": ("none", "none", "full", "selective"),
    "micro_batch": (1, 2),
}
"""Values of the section ``parallel`` that random plans have."""


class Case(NamedTuple):
    """A plan, the rank that is dry-run, and the moments that the planner expects of it."""

    plan: Plan
    rank: int
    moments: list[Moment]
    terms_bytes: dict[str, int]


@cache
def plan_or_none(text: str, folder: Path = FOLDER) -> Plan | None:
    """Return a spec's plan, or None if there is none."""
    spec = load_text(text).spec
    return None if spec is None else make_plan(spec, base_dir=folder, default_name="terms").plan


def cases_of(text: str, folder: Path = FOLDER) -> list[Case]:
    """Return the first and the last pipeline rank of a spec's plan."""
    spec = load_text(text).spec
    assert spec is not None
    plan, problem = plan_or_none(text, folder), resolve(spec, folder).problem
    assert plan is not None
    assert problem is not None
    mesh = plan.layout.mesh
    # In dry runs all experts get the same number of tokens.
    job = replace(cost_job(problem, plan.layout.compile), expert_imbalance=1.0)
    moments = rank_moments(job, plan.layout)
    ranks = plan.prediction.memory.ranks
    per_stage = mesh.world_size // mesh.pp
    places = sorted({0, mesh.pp - 1})
    return [Case(plan, at * per_stage, moments[at], ranks[at].terms_bytes) for at in places]


def executed(cases: Sequence[Case], folder: Path) -> list[dict[str, Any]]:
    """Return what the worker prints of each case."""
    arguments = []
    for number, case in enumerate(cases):
        (folder / f"{number}.json").write_text(case.plan.to_json())
        arguments.append(f"{folder / f'{number}.json'}:{case.rank}")
    command = [sys.executable, str(WORKER), str(Path(os.environ["PARTOOL_HOME"]) / "dry"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def agree(one: float, other: float) -> bool:
    return abs(one - other) <= max(SHARE * max(one, other), LEAST_BYTES)


def seen(moment: Moment, *, compiled: bool) -> dict[str, float]:
    """Return the bytes of a planned moment that a dry run sees.

    It does not see what exists inside of a kernel, and transfers to the host end at once. Of compiled blocks it runs
    the operators that the compiler fuses, one by one: tensors that live within a pass are left out on both sides.
    """
    found = {term: float(getattr(moment, term)) for term in VARYING}
    found["loss"] -= float(moment.within)
    found["gradients"] -= float(moment.grads_offloading)
    found["activations"] -= float(moment.working) if compiled else 0.0
    return found


def disagreements(case: Case, run: dict[str, Any]) -> list[str]:
    """Return the terms in which no planned moment agrees with the executed peak; moments must be about the fullest.

    Terms change in steps, so that two moments of nearly the same total may have quite different terms: any planned
    moment counts whose total agrees with that of the fullest one.
    """
    compiled = case.plan.layout.compile != "none"
    terms = run["kept" if compiled else "peak"]
    there = {term: terms.get(term, 0) for term in VARYING}
    there["activations"] += 0 if compiled else terms.get("working", 0)
    moments = [seen(moment, compiled=compiled) for moment in case.moments]
    most = max(sum(moment.values()) for moment in moments)
    fullest = [moment for moment in moments if agree(sum(moment.values()), most)]
    wrong = [[name for name in VARYING if not agree(moment[name], there[name])] for moment in fullest]
    nearest = min(range(len(wrong)), key=lambda at: (len(wrong[at]), -sum(fullest[at].values())))
    found = [f"{name}: {fullest[nearest][name]:.0f} planned, {there[name]} executed" for name in wrong[nearest]]
    if not agree(most, sum(there.values())):
        found.append(f"total: {most:.0f} planned, {sum(there.values())} executed")
    for name in ("parameters", "optimizer"):
        if not agree(case.terms_bytes[name], terms.get(name, 0)):
            found.append(f"{name}: {case.terms_bytes[name]} planned, {terms.get(name, 0)} executed")
    return found


def random_spec(seed: int) -> str:
    """Return a spec of a small model on up to 8 GPUs, with random mechanisms; not all of them are valid."""
    pick = random.Random(seed).choice
    parallel = {"compile": "none", **{name: pick(values) for name, values in MECHANISMS.items()}}
    hidden = pick([256, 512])
    model = {"layers": 4, "hidden": hidden, "heads": 8, "kv_heads": pick([2, 8]), "ffn_hidden": pick([2, 4]) * hidden,
             "vocab": pick([2048, 8192]), "tied_embeddings": pick([False, False, True])}  # fmt: skip
    training = {"global_batch": 16, "sequence_length": pick([256, 512]), "steps": 3,
                "precision": pick(["bf16", "bf16", "fp32"])}  # fmt: skip
    return yaml.safe_dump(
        {
            "model": model,
            "hardware": {"accelerator": "h100-sxm", "per_node": pick([1, 4, 8])},
            "training": training,
            "parallel": parallel,
            "data": "python-stdlib",
            "kernels": {"mode": pick(["auto", "auto", "torch"])},
        }
    )


def random_cases(count: int, first: int = 0) -> list[Case]:
    """Return cases of the first ``count`` valid specs from a seed on; of each plan, one pipeline rank."""
    found: list[Case] = []
    for seed in range(first, first + 40 * count):
        if plan_or_none(random_spec(seed), FOLDER) is None:
            continue
        cases = cases_of(random_spec(seed))
        found.append(cases[seed % len(cases)])
        if len(found) == count:
            return found
    raise AssertionError("too few specs are valid")


def of_gpus(path: Path) -> str:
    """Return a spec's text; one for CPUs becomes one for as many GPUs.

    On a CPU the planner adds up the phases of a step, as freed blocks stay resident: its terms are of no moment.
    """
    made = yaml.safe_load(path.read_text())
    if made["hardware"]["accelerator"] == "cpu":
        made["hardware"] = {"accelerator": "h100-sxm", "per_node": made["hardware"].get("per_node", 1)}
    return yaml.safe_dump(made)


@pytest.mark.timeout(100)
def test_terms_of_random_plans_agree_with_their_execution(tmp_path: Path) -> None:
    cases = random_cases(2)
    found = {
        index: disagreements(*each) for index, each in enumerate(zip(cases, executed(cases, tmp_path), strict=True))
    }
    assert not any(found.values()), found


PARTLY_ON_HOST = """
model: {layers: 6, hidden: 512, heads: 8, kv_heads: 8, ffn_hidden: 1024, vocab: 4096, max_position: 512}
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 8}
data: python-stdlib
training: {sequence_length: 512, global_batch: 64, steps: 3, precision: bf16}
parallel: {data: {zero: 3, shard: SHARD}, tensor: 1, sequence: 1, pipeline: {stages: 1}, micro_batch: 2,
  recompute: full, compile: none, tiles: {mlp: 0, loss: 0}, offload: {optimizer: cpu, gpu_fraction: 0.75,
  parameters: none, activations: none}}
"""


@pytest.mark.timeout(100)
def test_gradients_that_wait_for_the_norm_or_for_replicas_are_gradients(tmp_path: Path) -> None:
    """Most gradients stay on the device with their optimizer's state; replicas add up their shards at the end."""
    cases = [case for shard in (16, 8) for case in cases_of(PARTLY_ON_HOST.replace("SHARD", str(shard)))]
    alone, replicas = executed(cases, tmp_path)
    assert disagreements(cases[0], alone) == []
    # While replicas add up a layer's shards, these count as communication.
    shards = 4 * (3 * 512 * 1024 + 4 * 512 * 512 + 2 * 512) // 8
    replicas["peak"]["gradients"] += shards
    replicas["peak"]["communication"] -= shards
    assert disagreements(cases[1], replicas) == []


def with_experts(**changes: Any) -> str:
    """Return the spec of a small model with experts on 16 GPUs; ``changes`` are values by section and name."""
    made: dict[str, dict[str, Any]] = {
        "model": {"layers": 6, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn_hidden": 1024, "vocab": 4096,
                  "max_position": 512, "moe": {"experts": 32, "top_k": 2, "ffn_hidden": 256}},
        "hardware": {"accelerator": "h100-sxm", "nodes": 2, "per_node": 8},
        "training": {"sequence_length": 512, "global_batch": 32, "steps": 3, "precision": "bf16"},
        "parallel": {"data": {"zero": 3, "shard": 16}, "tensor": 1, "sequence": 1, "pipeline": {"stages": 1},
                     "micro_batch": 2, "recompute": "full", "compile": "none", "expert": 8,
                     "tiles": {"mlp": 0, "loss": 0},
                     "offload": {"optimizer": "none", "parameters": "none", "activations": "none"}},
        "kernels": {"mode": "auto"},
    }  # fmt: skip
    for name, value in changes.items():
        section, _, field = name.partition("__")
        made[section][field] = {**made[section][field], **value} if isinstance(value, dict) else value
    return yaml.safe_dump({**made, "data": "python-stdlib"})


EXPERTS = {
    "saved": {"parallel__recompute": "none"},
    "recomputed": {},
    "of one rank": {"parallel__expert": 1},
    "shared by all, accumulated": {"parallel__expert": 16, "training__global_batch": 64},
    "with shared experts": {"model__moe": {"shared_experts": 1}, "parallel__recompute": "none"},
    "residual experts": {"model__moe": {"shared_experts": 1, "residual": True}, "parallel__recompute": "none"},
    "wide": {"model__moe": {"experts": 8, "ffn_hidden": 2048}},
    "of torch's operators": {"kernels__mode": "torch"},
    "many choices": {"model__moe": {"experts": 64, "top_k": 6}},
    "ZeRO-2": {"parallel__data": {"zero": 2}},
    "ZeRO-1, accumulated": {"parallel__data": {"zero": 1}, "training__global_batch": 64},
    "tensor ranks": {"parallel__tensor": 2, "parallel__recompute": "none", "parallel__data": {"shard": 8},
                     "training__global_batch": 16},
    "sequential": {"parallel__data": {"gather": "sequential"}},
    "not ahead": {"parallel__data": {"prefetch": 0}},
    "dense first": {"model__moe": {"first_dense_layers": 2}, "parallel__recompute": "none"},
    "large dense first": {"model__moe": {"first_dense_layers": 1, "shared_experts": 1}, "model__ffn_hidden": 8192,
                          "parallel__recompute": "none"},
    "every second layer": {"model__moe": {"every": 2}, "parallel__recompute": "none"},
    "compiled": {"parallel__compile": "block"},
    "wide numbers": {"training__precision": "fp32", "parallel__recompute": "none"},
    "ZeRO-0": {"model__moe": {"experts": 4}, "parallel__data": {"zero": 0, "shard": "auto"}, "parallel__expert": 1},
}  # fmt: skip


PYRAMID = {"layers": {"3-4": {"experts": 64, "top_k": 3}, "5": {"experts": 48, "top_k": 1, "ffn_hidden": 640}}}
"""More experts in later layers, and wider ones in the last layer."""
PYRAMIDS = {
    "saved": {"model__moe": PYRAMID, "parallel__recompute": "none"},
    "recomputed": {"model__moe": {**PYRAMID, "first_dense_layers": 1}},
    "accumulated": {"model__moe": PYRAMID, "parallel__data": {"zero": 2}, "training__global_batch": 64},
    "tensor ranks": {"model__moe": PYRAMID, "parallel__tensor": 2, "parallel__recompute": "none",
                     "parallel__data": {"shard": 8}, "training__global_batch": 16},
}  # fmt: skip


BY_NODE = {
    f"{exchange}, recompute {recompute}": {
        "parallel__recompute": recompute, "parallel__expert": 16, "parallel__expert_exchange": exchange,
    }
    for exchange in ("node_first", "node_first_summed") for recompute in ("none", "full")
}  # fmt: skip


PADDED = {"parallel__expert": 8, "parallel__expert_exchange": "padded", "parallel__expert_rank_capacity": 1.5}
FIXED = {
    f"{title}, recompute {recompute}": {**fields, "parallel__recompute": recompute}
    for title, fields in {
        "padded": PADDED,
        "padded and compiled": PADDED | {"parallel__compile": "block"},
        "of one rank, compiled": {"parallel__expert": 1, "parallel__compile": "block"},
    }.items() for recompute in ("none", "selective", "full")
}  # fmt: skip


def disagreements_of_experts(names: Sequence[str], folder: Path, layers: int = 6) -> dict[str, list[str]]:
    specs = [with_experts(model__layers=layers, **(EXPERTS | BY_NODE | FIXED)[name]) for name in names]
    cases = [case for text in specs for case in cases_of(text)]
    each = zip(names, cases, executed(cases, folder), strict=True)
    return {name: wrong for name, case, run in each if (wrong := disagreements(case, run))}


@pytest.mark.timeout(100)
def test_terms_of_experts_agree_with_their_execution(tmp_path: Path) -> None:
    """Three layers, of which the first and the last differ from those between."""
    assert disagreements_of_experts(("saved", "recomputed"), tmp_path, layers=3) == {}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_terms_of_many_layouts_of_experts_agree_with_their_execution(tmp_path: Path) -> None:
    assert disagreements_of_experts(tuple(EXPERTS), tmp_path) == {}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_layers_whose_experts_differ_need_no_more_than_planned(tmp_path: Path) -> None:
    """Plans take the largest layer for its neighbours, too: they may count more than is executed, and no less."""
    cases = [case for changes in PYRAMIDS.values() for case in cases_of(with_experts(**changes))]
    shares: dict[str, float] = {}
    for name, case, run in zip(PYRAMIDS, cases, executed(cases, tmp_path), strict=True):
        peak = run["peak"]
        assert all(agree(case.terms_bytes[term], peak.get(term, 0)) for term in ("parameters", "optimizer")), name
        lasting = case.terms_bytes["parameters"] + case.terms_bytes["optimizer"]
        planned = lasting + max(float(moment.total) for moment in case.moments)
        shares[name] = planned / sum(peak.get(term, 0) for term in (*VARYING, "working", "parameters", "optimizer"))
    assert all(1 - SHARE <= share <= MOST_PLANNED for share in shares.values()), shares


@pytest.mark.long
@pytest.mark.timeout(900)
def test_terms_of_thirty_random_plans_agree_with_their_execution(tmp_path: Path) -> None:
    cases = random_cases(30)
    runs = executed(cases, tmp_path)
    found = {
        index: wrong for index, each in enumerate(zip(cases, runs, strict=True)) if (wrong := disagreements(*each))
    }
    assert not found, found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.stem for path in SPECS.glob("*.yaml")))
def test_terms_of_a_spec_agree_with_its_execution(name: str, tmp_path: Path) -> None:
    cases = cases_of(of_gpus(SPECS / f"{name}.yaml"), SPECS)
    runs = executed(cases, tmp_path)
    if any("refused" in run for run in runs):
        assert {run["refused"] for run in runs} == {REFUSED.get(name)}, "listed with the finding"
        return
    assert name not in REFUSED
    found = [disagreements(*each) for each in zip(cases, runs, strict=True)]
    assert not any(found), found


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_temporaries_of_lamb_are_those_of_its_execution(tmp_path: Path) -> None:
    """The update of this large model with short sequences is the fullest moment of a step."""
    made = yaml.safe_load(random_spec_of_one())
    made["model"] = {"layers": 2, "hidden": 1024, "heads": 8, "ffn_hidden": 4096, "vocab": 32000}
    made["training"] = {"global_batch": 1, "sequence_length": 64, "steps": 2}
    made["parallel"] |= {"tensor": {"degree": 2, "sequence_norms": False}}
    made |= {"hardware": {"accelerator": "h100-sxm", "per_node": 2}, "optimizer": {"name": "lamb"}}
    (case,) = cases_of(yaml.safe_dump(made))
    fullest = max(case.moments, key=lambda moment: float(moment.total))
    assert (fullest.name, float(fullest.communication)) == ("update", 2 * 4 * 2**24)
    assert disagreements(case, *executed([case], tmp_path)) == []


def test_the_comparison_finds_a_term_that_is_wrong() -> None:
    """A moment that nearly is the fullest counts, one that is far from it does not; each term is compared."""
    (case,) = cases_of(random_spec_of_one())
    fullest = max(case.moments, key=lambda moment: float(moment.total))
    terms = seen(fullest, compiled=False) | {name: case.terms_bytes[name] for name in ("parameters", "optimizer")}
    assert disagreements(case, {"peak": terms, "kept": {}}) == []
    for name in (*VARYING, "parameters", "optimizer"):
        wrong = terms | {name: terms[name] * 1.05 + 2**21}
        assert any(name in each for each in disagreements(case, {"peak": wrong, "kept": {}})), name


def random_spec_of_one() -> str:
    """Return the spec of a model on one GPU."""
    made = yaml.safe_load(random_spec(0))
    made |= {"hardware": {"accelerator": "h100-sxm", "per_node": 1}, "parallel": {"compile": "none"}}
    return yaml.safe_dump(made)


def test_a_plan_is_priced_again_with_the_gathers_of_its_layout() -> None:
    made = yaml.safe_load(random_spec(0))
    made |= {"hardware": {"accelerator": "h100-sxm", "per_node": 4}}
    made["parallel"] = {"compile": "none", "data": {"zero": 3, "gather": "sequential", "prefetch": 2}}
    (case,) = cases_of(yaml.safe_dump(made))
    again = rank_moments(job_of_plan(case.plan, case.plan.devices), case.plan.layout)
    assert again == [case.moments]
    usual = case.plan.layout.model_copy(
        update={"data": case.plan.layout.data.model_copy(update={"gather": "coalesced"})}
    )
    other = case.plan.model_copy(update={"layout": usual})
    assert rank_moments(job_of_plan(other, other.devices), usual) != [case.moments]


def totals(names: Sequence[str], folder: Path) -> dict[str, float]:
    """Return planned total over executed total of the layouts in which the two differ."""
    wrong = disagreements_of_experts(names, folder, layers=3)
    lines = {name: line for name, lines in wrong.items() for line in lines if line.startswith("total")}
    pairs = {name: [float(number) for number in re.findall(r"\d+", line)] for name, line in lines.items()}
    return {name: planned / executed for name, (planned, executed) in pairs.items()}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_totals_of_exchanges_by_node_agree_with_their_execution(tmp_path: Path) -> None:
    """Their fullest moment is that of gradients on their way to the experts, of which the terms are not told apart."""
    assert totals(tuple(BY_NODE), tmp_path) == {}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_layers_of_experts_without_waits_need_no_more_than_planned(tmp_path: Path) -> None:
    """A compiler recomputes a little more than the plan counts."""
    assert all(1.0 < share <= 1.06 for share in totals(tuple(FIXED), tmp_path).values())
