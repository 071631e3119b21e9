"""Plans of whole specs: invariants, findings, and the correctness of advice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import named
from planned import plan_of, result_of

from partool.layout.parameters import count, parameters
from partool.plan.types import Plan
from partool.planner import PlanResult, make_plan
from partool.planner.explain.batches import beside
from partool.planner.explain.fewer import AS_FAST, _sizes
from partool.planner.problem import Problem
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced
from partool.spec.spec import Spec

ROOT = Path(__file__).parents[3]
STATE = ("parameters", "optimizer")


def planner_says(text: str, overrides: Sequence[str] = ()) -> PlanResult:
    return result_of(text, *overrides, folder=ROOT / "specs")


def planned(text: str, overrides: Sequence[str] = ()) -> Plan:
    return planned_once(text, *overrides)


@cache
def planned_once(text: str, *overrides: str) -> Plan:
    return plan_of(text, *overrides, folder=ROOT / "specs")


def codes(result: PlanResult) -> list[str]:
    return [finding.code for finding in result.diagnostics]


SMALL = """\
model: {layers: 4, hidden: 256, heads: 8, kv_heads: 4, vocab: 300}
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {sequence_length: 512, global_batch: 64}
"""

ONLY_DATA = "tensor: 1, pipeline: 1, sequence: 1, offload: {optimizer: none, parameters: none, activations: none}"
ONE_LAYOUT = SMALL + f"parallel: {{{ONLY_DATA}, data: {{zero: 0}}, micro_batch: 1, recompute: none, compile: none}}\n"
"""A spec for tests of what does not depend on the layout: nothing is searched."""

models = st.sampled_from(
    [
        {"layers": 2, "hidden": 48, "heads": 6, "kv_heads": 2, "vocab": 301},
        {"layers": 3, "hidden": 64, "heads": 4, "vocab": 256, "norm": "layernorm", "activation": "gelu_tanh"},
        {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "position": "learned", "tied_embeddings": True},
        {"layers": 4, "hidden": 32, "heads": 2, "vocab": 999, "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 48}},
        {"preset": "llama3.2-1b"},
        {"preset": "llama3-70b"},
        {"preset": "deepseek-v3"},
        {"preset": "gpt2-xl", "frozen": ["embed.*"]},
    ]
)
accelerators = st.sampled_from(["h100-sxm", "a100-40", "mi300x", "t4", "cpu", "no-such"])
degrees = st.sampled_from(["auto", "auto", 1, 1, 2, 3, 4])
nodes = st.sampled_from([1, 1, 2, 3])


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Return a spec with legal values; most can be planned, some break a rule of the planner."""
    cpu = draw(accelerators)
    document = {
        "model": draw(models),
        "hardware": {"accelerator": cpu, "nodes": draw(nodes), "per_node": draw(st.sampled_from([1, 2, 3, 4, 8]))},
        "parallel": {
            "data": {"zero": draw(st.sampled_from(["auto", 0, 1, 2, 3])), "shard": "auto"},
            "tensor": draw(degrees),
            "pipeline": {"stages": draw(degrees), "schedule": draw(st.sampled_from(["auto", "1f1b", "interleaved"]))},
            "sequence": {"degree": draw(degrees)},
            "expert": draw(degrees),
            "expert_tensor": draw(st.sampled_from(["auto", "auto", "auto", 1, 2])),
            "offload": {"optimizer": draw(st.sampled_from(["auto", "none", "cpu"]))},
            "recompute": draw(st.sampled_from(["auto", "none", "selective", "full", ["none", "full"]])),
            "micro_batch": draw(st.sampled_from(["auto", "auto", 1, 2, 5])),
        },
        "training": {
            "sequence_length": draw(st.sampled_from([16, 48, 1024])),
            "global_batch": draw(st.sampled_from([1, 12, 48, 96])),
            "precision": draw(st.sampled_from(["fp32", "bf16", "fp16", "fp64"])),
        },
        "data": {"source": "python-stdlib"},
    }
    return Spec.model_validate(document)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(specs())
def test_any_spec_gives_a_sound_plan_or_findings(spec: Spec) -> None:
    check_result(spec)


@pytest.mark.long
@settings(max_examples=80, deadline=None, derandomize=True)
@given(specs())
def test_many_specs_give_sound_plans_or_findings(spec: Spec) -> None:
    check_result(spec)


def check_result(spec: Spec) -> None:
    result = make_plan(spec, base_dir=ROOT, default_name="test")
    errors = [finding for finding in result.diagnostics if finding.severity == "error"]
    assert (result.plan is None) == bool(errors)
    assert len({(f.code, f.path, f.message) for f in result.diagnostics}) == len(result.diagnostics)
    if result.plan is None:
        assert all(finding.help for finding in errors)
        return
    plan = result.plan
    layout, mesh, devices = plan.layout, plan.layout.mesh, plan.devices
    assert mesh.world_size == devices.nodes * devices.per_node
    assert layout.micro_batch * layout.derived.accumulation * mesh.dp == plan.training.global_batch
    assert len(layout.recompute) == plan.model.layers
    assert layout.pipeline.bounds[0][0] == 0
    assert layout.pipeline.bounds[-1][1] == plan.model.layers
    memory, time = plan.prediction.memory, plan.prediction.time
    assert memory.total_bytes == sum(memory.terms_bytes.values()) <= memory.capacity_bytes
    assert time.step_time_s == pytest.approx(sum(time.terms_s.values()))
    assert all(value >= 0 for value in (*memory.terms_bytes.values(), *time.terms_s.values()))
    assert plan.runnable == (not plan.not_runnable)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash


@settings(max_examples=15, deadline=None, derandomize=True)
@given(models, st.sampled_from([2, 4, 8]), st.sampled_from([1, 4]), st.sampled_from(["none", "full"]))
def test_more_sharing_never_needs_more_memory(model: dict[str, Any], ranks: int, k: int, recompute: str) -> None:
    """Higher stages and more ranks never mean more state on a rank."""

    def memory(zero: int, per_node: int) -> dict[str, int]:
        document = {
            "model": model,
            "hardware": {"accelerator": "h100-sxm", "per_node": per_node},
            "parallel": {
                "data": {"zero": zero, "shard": per_node if zero else 1},
                "micro_batch": 1,
                "recompute": recompute,
                "compile": "none",
                "tensor": 1,
                "pipeline": {"stages": 1},
                "sequence": {"degree": 1},
                "expert": 1,
                "offload": {"optimizer": "none", "parameters": "none", "activations": "none"},
            },
            "training": {"sequence_length": 64, "global_batch": k * per_node},
            "data": {"source": "python-stdlib"},
        }
        problem = _problem(Spec.model_validate(document))
        space = build(problem)
        assert (space.size, len(space.policies)) == (1, 1)
        layout = layout_of(problem, space.rows(0, 0))
        return {**Priced(problem, layout).memory.terms_bytes, "count": problem.parameters}

    stages = [memory(zero, ranks) for zero in range(4)]
    for lower, higher in pairwise(stages):
        for term in STATE:
            assert higher[term] <= lower[term]
    # Other terms are those at the peak, which stages may have at different moments: of one whole copy at most.
    assert all(stage["gathered"] <= 2 * stage["count"] for stage in stages)
    assert all(stage["gradients"] <= 4 * stage["count"] for stage in stages)
    for zero in (1, 2, 3):
        fewer, more = memory(zero, ranks), memory(zero, 2 * ranks)
        assert sum(more[term] for term in STATE) <= sum(fewer[term] for term in STATE)


def _problem(spec: Spec) -> Problem:
    from partool.catalog.hardware import resolve_hardware
    from partool.catalog.models import resolve_model

    model = resolve_model(spec.model, ROOT).config
    devices = resolve_hardware(spec.hardware, spec.training.precision).devices
    assert model is not None
    assert devices is not None
    return Problem(spec, model, devices)


def test_planning_is_deterministic() -> None:
    assert planned(SMALL).to_json() == plan_of(SMALL, folder=ROOT / "specs").to_json()


def test_hash_follows_what_runs() -> None:
    base = planned(ONE_LAYOUT)
    assert planned(ONE_LAYOUT, ["limits.memory_headroom=0.05"]).hash == base.hash
    assert planned(ONE_LAYOUT, ["training.seed=1"]).hash != base.hash


def test_what_the_spec_pins_is_kept() -> None:
    pins = ["parallel.data.zero=3", "parallel.data.shard=4", "parallel.micro_batch=2", "parallel.recompute=full"]
    layout = planned(SMALL, [*pins, "parallel.compile=none"]).layout
    assert (layout.data.zero, layout.mesh.dp_shard, layout.mesh.dp_replicate) == (3, 4, 2)
    assert (layout.micro_batch, layout.derived.accumulation, layout.compile) == (2, 4, "none")
    assert set(layout.recompute) == {"full"}


def test_tight_memory_leads_to_higher_stages() -> None:
    text = SMALL.replace("{layers: 4, hidden: 256, heads: 8, kv_heads: 4, vocab: 300}", "llama3-8b")
    roomy = planned(text, ["hardware.memory_gib=300"]).layout
    narrow = planned(text, ["hardware.memory_gib=45", "parallel.pipeline=1"]).layout
    assert roomy.data.zero < 3
    assert narrow.data.zero == 3


def test_several_problems_come_in_one_run() -> None:
    result = planner_says(
        SMALL.replace("accelerator: h100-sxm", "accelerator: h100-xsm").replace("python-stdlib", "/none/*.txt")
        + "parallel: {tensor: 2}\n",
        ["model.preset=lama3-8b"],
    )
    assert {"PT250", "PT260"} <= set(codes(result))
    both = planner_says(SMALL, ["parallel.tensor=3", "parallel.expert=2", "model.vocab=7"])
    assert {"PT266", "PT258", "PT267"} <= set(codes(both))


def test_vocabularies_are_held_to_the_data_not_to_a_tokenizer_that_reads_none(tmp_path: Path) -> None:
    """Only token files can state their vocabulary; the byte tokenizer applies to text only."""
    for name, sidecar in (("known", '{"dtype": "uint16", "count": 2, "vocab": 50}'), ("unknown", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(bytes(4))
        (tmp_path / name / "a.json").write_text(sidecar)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("text")

    def found(*sources: str, vocab: int = 100, format: str = "auto") -> bool:
        sets = [f"data.source=[{', '.join(f'{tmp_path}/{source}' for source in sources)}]", f"data.format={format}"]
        return "PT258" in codes(planner_says(ONE_LAYOUT, [*sets, f"model.vocab={vocab}"]))

    quiet = [("known",), ("known/a.bin",), ("known/*.bin",), ("unknown",), ("unknown/a.bin",), ("known", "unknown")]
    assert not any(found(*sources) for sources in quiet)
    assert not found("gone/*.bin")
    assert not found("gone", format="megatron")
    assert found("known", vocab=49)
    assert found("known", "mixed")
    assert found("mixed")
    assert not found("mixed", vocab=256)
    without = ONE_LAYOUT.replace(", vocab: 300", "").replace("python-stdlib", str(tmp_path / "known"))
    assert planned(without).model.vocab == 50


DOES_NOT_FIT = {
    "pinned stage": "model: llama3-8b\nhardware: {accelerator: h100-sxm, per_node: 8}\ndata: python-stdlib\n"
    f"training: {{global_batch: 64}}\nparallel: {{data: {{zero: 0}}, {ONLY_DATA}}}\n",
    "pinned micro-batch": "model: llama3.2-1b\nhardware: {accelerator: a100-40, per_node: 2}\ndata: python-stdlib\n"
    f"training: {{global_batch: 64}}\nparallel: {{micro_batch: 32, recompute: none, {ONLY_DATA}}}\n",
    "too few devices": "model: llama3-70b\nhardware: {accelerator: h100-sxm, per_node: 2}\ndata: python-stdlib\n"
    f"training: {{global_batch: 64}}\nparallel: {{{ONLY_DATA}}}\n",
    "long sequences": "model: {preset: llama3.2-1b, max_position: 999999}\nhardware: {accelerator: a10g, per_node: 2}\n"
    "data: python-stdlib\ntraining: {global_batch: 2, sequence_length: 524288}\n"
    f"parallel: {{{ONLY_DATA.replace('sequence: 1, ', '')}}}\n",
}


@pytest.mark.parametrize("text", named(DOES_NOT_FIT, ["pinned micro-batch", "too few devices"]))
def test_advice_on_memory_is_true(text: str) -> None:
    """Every change that the finding proposes, written into the spec, yields a plan with the stated step time."""
    (finding,) = (d for d in planner_says(text).diagnostics if d.code == "PT301")
    assert re.search(r"needs [\d.]+ GiB per rank", finding.message)
    advices = finding.help.split("; or ")
    for advice in advices:
        found = re.fullmatch(r"([a-z_.]+): (\S+) \((\S+) s per step, .*\)", advice)
        assert found, advice
        plan = planned(text, [f"{found[1]}={found[2]}"])
        assert plan.prediction.time.step_time_s == pytest.approx(float(found[3]), rel=0.01)


def test_change_of_an_alternative_gives_that_alternative() -> None:
    plan = planned(SMALL)
    for other in (one for one in plan.alternatives if one.devices == plan.layout.mesh.world_size):
        assert other.memory_bytes is not None
        changed = planned(SMALL + other.change + "\n")
        assert changed.prediction.memory.total_bytes == other.memory_bytes
        assert changed.prediction.time.step_time_s == pytest.approx(other.step_time_s)


def test_frozen_parameters_have_no_state() -> None:
    pins = ["parallel.data.zero=0", "parallel.micro_batch=1"]
    whole, part = planned(SMALL, pins), planned(SMALL, [*pins, "model.frozen=[embed.*]"])
    saved = 8 * 300 * 256
    terms = (whole.prediction.memory.terms_bytes["optimizer"], part.prediction.memory.terms_bytes["optimizer"])
    assert terms[0] == 8 * count(parameters(whole.model))
    assert terms[0] - terms[1] == pytest.approx(saved, abs=8)


def test_paths_are_absolute() -> None:
    plan = planned(SMALL, ["data.source=a/*.txt", "checkpoint.dir=out"])
    assert plan.data.source == str(ROOT / "specs" / "a/*.txt")
    assert plan.checkpoint.dir == str(ROOT / "specs" / "out")
    assert [finding.code for finding in plan.findings] == ["PT601"]
    assert planner_says(SMALL.replace("h100-sxm", "cpu"), ["data.source=a/*.txt"]).plan is None


def test_data_that_lie_on_the_cluster_can_be_planned() -> None:
    """On every accelerator: an error where the ranks run here, a warning where they do not, a note below a mount."""
    pod = ["launch.target=k8s", "launch.image=registry.example/train:1", "launch.k8s.storage=pvc:runs"]
    mounts = "launch.mounts=[{source: 'pvc:datasets', target: /nowhere}]"
    cases: list[tuple[list[str], str, str]] = [
        ([], "error", ""),
        (["launch.target=slurm"], "warning", " on this machine"),
        (pod, "warning", " on this machine"),
        ([*pod, mounts], "note", " on this machine; the ranks see pvc:datasets there"),
        ([*pod, mounts.replace("nowhere", "no")], "warning", " on this machine"),
    ]
    for accelerator in ("cpu", "auto"):
        text = ONE_LAYOUT.replace("h100-sxm, per_node: 8", f"{accelerator}, per_node: 2")
        for overrides, severity, where in cases:
            more = ["data.source=/nowhere/*.txt", "data.tokenizer=/nowhere/t", *overrides]
            result = planner_says(text, more)
            found = {one.code: one for one in result.diagnostics if one.code in ("PT601", "PT603")}
            assert [one.severity for one in found.values()] == [severity, severity]
            assert found["PT601"].message == f"there are no files at /nowhere/*.txt{where}"
            assert found["PT603"].message.startswith(f"/nowhere/t/tokenizer.json cannot be read{where}: ")
            assert (result.plan is None) == (severity == "error")
    runs = planner_says(text, [*pod, "data.source=/partool/tokens"])
    assert [(one.code, one.severity) for one in runs.diagnostics if one.code == "PT601"] == [("PT601", "note")]


LARGE = """\
model: llama3-8b
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {sequence_length: 8192, global_batch: 64}
"""


def test_auto_takes_what_runs() -> None:
    plan = planned(LARGE)
    assert plan.runnable
    assert plan.alternatives
    assert all(other.runnable for other in plan.alternatives)
    plain = [other.score_s for other in plan.alternatives if not other.role]
    assert plain == sorted(plain)  # type: ignore[type-var]
    assert [other.role == "does not fit" for other in plan.alternatives][-1]
    assert planned(LARGE, ["hardware.nodes=2", "launch.target=torchrun"]).runnable


def test_candidates_hold_the_plan_and_its_front() -> None:
    plan = planned(LARGE)
    own = [row for row in plan.candidates if not row.why_not]
    assert len(own) == 1
    assert own[0].step_time_s == plan.prediction.time.step_time_s
    assert own[0].memory_bytes == plan.prediction.memory.total_bytes
    assert len(plan.candidates) <= 40
    front = [(row.step_time_s, row.memory_bytes, row.devices) for row in plan.candidates if row.pareto]
    assert len(front) > 2
    for one in front:
        assert not any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True))
            for other in ((row.step_time_s, row.memory_bytes, row.devices) for row in plan.candidates)
        )
    assert len({row.devices for row in plan.candidates}) > 1
    search = plan.search
    assert search is not None
    assert search.enumerated > search.fitting > search.simulated > 0
    assert plan.limit


def test_a_batch_that_ranks_cannot_share_leaves_them_sequences() -> None:
    """Twelve sequences over eight devices: some devices must share sequences, matrices, or layers."""
    for pins in ([], ["parallel.pipeline=1", "parallel.tensor=1"]):
        plan = planned(LARGE, ["training.global_batch=12", *pins])
        assert plan.runnable
        assert plan.layout.mesh.dp in (1, 2, 4)
        assert plan.layout.mesh.cp > 1 or not pins


def test_host_memory_is_a_limit() -> None:
    """An optimizer that would fit into a large host does not fit into a small one."""
    text = (
        LARGE.replace("llama3-8b", "llama3-70b")
        + "parallel: {pipeline: 1, tensor: 1, sequence: 1, offload: {optimizer: cpu}, recompute: full}\n"
    )
    assert planned(text, ["hardware.host_memory_gib=4000"]).layout.offload.optimizer == "cpu"
    found = planner_says(text, ["hardware.host_memory_gib=60"])
    assert found.plan is None
    assert "PT301" in codes(found)


def test_a_batch_that_does_not_bind_costs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 sequences four of eight ranks could have equal numbers; the layout has fewer data-parallel ranks."""
    text = "model: llama3-8b\nhardware: {accelerator: h100-sxm, per_node: 8}\ndata: python-stdlib\n"
    text += "training: {global_batch: 100, sequence_length: 2048}\nparallel: {data: {zero: 1}, tensor: {degree: 8}}\n"

    def quickest(problem: object) -> None:
        raise AssertionError("a search for another batch")

    monkeypatch.setattr("partool.planner.explain.batches.least_bound", quickest)
    planned = planner_says(text.replace(", tensor: {degree: 8}", ""), ["parallel.pipeline.stages=4"])
    assert planned.plan is not None
    assert "PT463" not in codes(planned)


def test_a_batch_that_leaves_no_good_layout_is_named() -> None:
    """The batch beside it saves what the finding says, when it is planned."""
    text = "model: llama3.2-1b\nhardware: {accelerator: h100-sxm, nodes: 2, per_node: 8}\ndata: python-stdlib\n"
    text += "training: {global_batch: 127, sequence_length: 2048}\n"
    prime = planner_says(text)
    (found,) = [one for one in prime.diagnostics if one.code == "PT463"]
    assert found.message.startswith("global_batch: 127 divides among 1 of the 16 ranks at most")
    said = re.match(r"global_batch: 128 would save (\d+)% of the time per token, with ZeRO", found.help)
    assert said is not None
    even = planner_says(text, ["training.global_batch=128"])
    assert "PT463" not in codes(even)
    assert prime.plan is not None
    assert even.plan is not None
    times = [plan.prediction.time.step_time_s / plan.training.global_batch for plan in (prime.plan, even.plan)]
    assert 1 - times[1] / times[0] >= int(said[1]) / 100 - 0.05
    assert even.plan.layout.mesh.dp == 16


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    [(127, 16, [112, 128]), (120, 16, [112, 128]), (128, 16, []), (1024, 4096, []), (3, 16, []), (1000, 1024, [1024])],
)
def test_batches_beside_an_awkward_one(batch: int, ranks: int, expected: list[int]) -> None:
    assert beside(batch, ranks) == expected


def test_fewer_devices_that_would_be_as_fast_are_named() -> None:
    """The finding names the spec's line; a plan with that line takes the stated time and has no such finding."""
    text = """\
model: llama3.2-1b
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 4, fabric: ethernet-100g}
training: {sequence_length: 512, global_batch: 32}
parallel: {tensor: 1, pipeline: 1, sequence: 1, micro_batch: 4}
data: python-stdlib
"""
    result = planner_says(text)
    assert result.plan is not None
    found = [one for one in result.diagnostics if one.code == "PT276"]
    assert [one.severity for one in found] == ["warning"]
    assert "PT276" in {one.code for one in result.plan.findings}
    said = re.fullmatch(
        r"4 of the 8 devices would take ([0-9.]+) ms per step, all .* take ([0-9.]+) ms: .*", found[0].message
    )
    assert said is not None
    assert float(said[2]) == pytest.approx(1e3 * result.plan.prediction.time.step_time_s, rel=0.01)
    assert found[0].help.startswith("write hardware: {nodes: 1}")
    smaller = planner_says(text, ["hardware.nodes=1"])
    assert smaller.plan is not None
    assert 1e3 * smaller.plan.prediction.time.step_time_s <= 1.01 * float(said[1])
    assert "PT276" not in codes(smaller)
    # A run that requires at least that many nodes cannot follow the advice.
    assert "PT276" not in codes(planner_says(text, ["launch.target=slurm", "launch.min_nodes=2"]))


def test_fewer_nodes_that_divide_the_batch_are_named() -> None:
    """24 sequences divide among the devices of three nodes, not of four: only their number is faster."""
    text = """\
model: gpt2-xl
hardware: {accelerator: a100-80, nodes: 4, fabric: ib-ndr}
training: {sequence_length: 1024, global_batch: 24}
parallel: {pipeline: 1, sequence: 1}
data: python-stdlib
"""
    result = planner_says(text)
    assert result.plan is not None
    (one,) = [one for one in result.diagnostics if one.code == "PT276"]
    said = re.fullmatch(
        r"(24) of the 32 devices would take ([0-9.]+) ms per step, all .* ([0-9.]+) ms: .*", one.message
    )
    assert said is not None
    assert float(said[2]) <= (1.0 + AS_FAST) * float(said[3])
    assert one.help.startswith("write hardware: {nodes: 3}")


@pytest.mark.parametrize(
    ("nodes", "per_node", "least", "expected"),
    [
        (16, 8, 0, [(14, 8), (12, 8), (10, 8), (8, 8), (4, 8)]),
        (12, 8, 6, [(10, 8), (9, 8), (8, 8), (6, 8)]),
        (2, 4, 0, [(1, 4), (1, 2), (1, 1)]),
        (1, 8, 0, [(1, 4), (1, 2)]),
        (1, 1, 0, []),
    ],
)
def test_smaller_numbers_of_devices(nodes: int, per_node: int, least: int, expected: list[tuple[int, int]]) -> None:
    devices = SimpleNamespace(nodes=nodes, per_node=per_node, backend="cuda")
    spec = SimpleNamespace(launch=SimpleNamespace(min_nodes=least or None))
    assert list(_sizes(SimpleNamespace(devices=devices, spec=spec))) == expected  # type: ignore[arg-type]
