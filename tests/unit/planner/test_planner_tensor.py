"""Plans with tensor parallelism: the forms tried and chosen, the reasons, and the refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planned import plan_of, problem_of

from partool.plan.as_spec import own_yaml
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.planner.explain import settings
from partool.planner.explain.summary import summary
from partool.planner.forms.tensor_forms import TensorForm, busy, divides, forms, inner_sizes, sent_s
from partool.planner.problem import Problem
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced
from partool.planner.search.solve import solve
from partool.spec import load_text
from partool.spec.numbers import GIB

CPU = "model: {layers: 2, hidden: 30, ffn_hidden: 34, heads: 7, kv_heads: 7, head_dim: 4, vocab: 256}\n" \
    "hardware: {accelerator: cpu, per_node: RANKS}\ndata: python-stdlib\n" \
    "training: {sequence_length: 32, global_batch: 12, precision: fp32}\n"  # fmt: skip
GPUS = "model: {layers: 4, hidden: 4096, ffn_hidden: 14336, heads: 32, kv_heads: KV, head_dim: 128, vocab: 128256}\n" \
    "hardware: {accelerator: h100-sxm, nodes: NODES, per_node: 8, fabric: ib-ndr}\ndata: python-stdlib\n" \
    "training: {sequence_length: 4096, global_batch: 16}\n"  # fmt: skip
ALONE = "data: {zero: 1}, pipeline: 1, sequence: 1, offload: {optimizer: none, parameters: none, activations: none}"


def cpu(ranks: int, tensor: object) -> str:
    return CPU.replace("RANKS", str(ranks)) + f"parallel: {{{ALONE}, tensor: {tensor}, micro_batch: 2}}\n"


def gpus(tensor: object, *, kv: int = 8, nodes: int = 1, more: str = "") -> str:
    text = GPUS.replace("KV", str(kv)).replace("NODES", str(nodes))
    return text + f"parallel: {{{ALONE}, tensor: {tensor}, micro_batch: 2{more}}}\n"


def reason(plan: Plan, start: str) -> str:
    (found,) = (text for text in plan.reasons if text.startswith(start))
    return found


def test_two_cpu_ranks_share_a_small_model_by_data_not_by_matrices() -> None:
    """Measured (tests/bench/data_parallel.py): a step of two tensor ranks takes 1.2 times ZeRO-1's here."""
    text = """
model: {layers: 8, hidden: 384, ffn_hidden: 1024, heads: 6, kv_heads: 6, vocab: 6144, max_position: 256}
hardware: {accelerator: cpu, per_node: 2, memory_gib: 16}
training: {sequence_length: 256, global_batch: 8, precision: fp32}
data: python-stdlib
parallel: {recompute: none, pipeline: 1}
"""
    chosen = plan_of(text)
    assert (chosen.layout.mesh.dp, chosen.layout.mesh.tp) == (2, 1)
    pinned = plan_of(text.replace("pipeline: 1", "pipeline: 1, tensor: 2"))
    assert 1.05 < pinned.prediction.time.step_time_s / chosen.prediction.time.step_time_s < 1.4


def test_pinned_degree_that_does_not_divide_is_planned_and_runs() -> None:
    plan = plan_of(cpu(3, 3))
    assert plan.runnable
    assert plan.layout.mesh.tp == 3
    codes = {finding.code for finding in plan.findings}
    assert "PT203" in codes  # ranks hold 3, 3 and 1 of seven heads
    assert reason(plan, "Query heads per tensor rank") == (
        "Query heads per tensor rank: 3, 3, 1; time and memory are those of the rank that has most."
    )
    assert any(row.name == "layers.*.attention.q.weight" for row in plan.partition)


def test_ranks_without_heads_are_planned_with_a_warning() -> None:
    plan = plan_of(cpu(8, 8).replace("global_batch: 12", "global_batch: 16"))
    assert plan.layout.mesh.tp == 8
    assert "PT444" in {finding.code for finding in plan.findings}


def test_open_degrees_prefer_those_that_divide() -> None:
    tensors = {int(tp) for tp in np.unique(build(problem_of(gpus("auto"))).groups.tp)}
    assert tensors == {1, 2, 4, 8}
    # Of 6 heads over up to four ranks 2 divide; 3 and 4 are left out. Of 7 heads none divides, so all are tried.
    open_ = cpu(4, "auto").replace("global_batch: 12", "global_batch: 16")
    six = open_.replace("heads: 7, kv_heads: 7", "heads: 6, kv_heads: 6")
    assert {int(tp) for tp in np.unique(build(problem_of(six)).groups.tp)} == {1, 2}
    assert {int(tp) for tp in np.unique(build(problem_of(open_)).groups.tp)} == {1, 2, 4}
    model = problem_of(open_).model
    assert not divides(model, 2)
    assert busy(model, 4)
    assert not busy(model, 8)


def test_forms_of_a_degree() -> None:
    assert forms(problem_of(gpus(4)), 1, 1) == (TensorForm(),)
    assert forms(problem_of(gpus(4)), 4, 1)[:2] == (TensorForm(1, 0), TensorForm(1, 1))
    assert forms(problem_of(gpus("{degree: 4, sequence_norms: true}")), 4, 1) == (TensorForm(1, 1),)
    assert forms(problem_of(gpus("{shape: [2, 2]}")), 4, 1) == (TensorForm(2),)
    assert forms(problem_of(gpus("{shape: [4, 1], sequence_norms: false}")), 4, 1) == (TensorForm(1, 0),)
    assert forms(problem_of(gpus("{degree: 4, overlap: symmetric}")), 4, 1) == (TensorForm(1, 1),)


def least_sent(problem: Problem, ranks: int, micro_batch: int = 16) -> int:
    """Return the d2 with which a layer's collectives take least time; 1 where it is t × 1."""
    return min((1, *inner_sizes(problem, ranks)), key=lambda inner: sent_s(problem, ranks, inner, micro_batch))


def test_all_shapes_are_tried_and_some_send_less() -> None:
    """Within a node 4 × 2 sends less than 8 × 1 if inner widths, whose products it sums, are not wide.

    Short sequences are an exception, and no shape of four sends less.
    """

    def narrow(tensor: int, kv: int = 8) -> str:
        return gpus(tensor, kv=kv).replace("ffn_hidden: 14336", "ffn_hidden: 4096")

    problem = problem_of(narrow(8))
    assert inner_sizes(problem, 8) == (2, 4, 8)
    assert {form.inner for form in forms(problem_of(gpus(8)), 8, 1)} >= {1, 2, 4, 8}
    assert least_sent(problem, 8) == 2
    assert sent_s(problem, 8, 2, 16) < 0.95 * sent_s(problem, 8, 1, 16)
    assert least_sent(problem_of(gpus(8)), 8) == 1
    assert sent_s(problem_of(gpus(8)), 8, 2, 16) > sent_s(problem, 8, 2, 16)
    short = problem_of(narrow(8).replace("sequence_length: 4096", "sequence_length: 512"))
    assert sent_s(short, 8, 2, 1) > sent_s(short, 8, 1, 1)
    assert least_sent(problem, 4) == 1
    # Key heads that do not divide evenly allow one dimension only.
    assert inner_sizes(problem_of(narrow(8, kv=4)), 8) == ()


def test_tiers_decide_the_shape() -> None:
    """Over a slow network two dimensions keep most traffic within the nodes; over a fast one they gain nothing.

    Nor do they between two nodes, where an all-reduce's tree sends each sum over the network once in each direction.
    Among three, 24 × 1 sends 2 · 23/24 of a tensor from each node, and 3 × 8 only 2 · 2/3.
    """

    def slow(tensor: str) -> str:
        model = gpus(tensor, nodes=3, kv=24).replace("heads: 32", "heads: 48").replace("14336", "15360")
        return model.replace("ib-ndr", "ethernet-100g")

    assert least_sent(problem_of(slow("24").replace("ethernet-100g", "ib-ndr")), 24) == 1
    assert least_sent(problem_of(gpus(16, nodes=2, kv=16).replace("ib-ndr", "ethernet-100g")), 16) == 1
    assert least_sent(problem_of(slow("24")), 24) == 8
    chosen, plain = plan_of(slow("24")), plan_of(slow("{shape: [24, 1]}"))
    assert chosen.prediction.time.step_time_s < 0.8 * plain.prediction.time.step_time_s
    assert chosen.layout.tensor.inner == 8
    text = reason(chosen, "Tensor 3 × 8: collectives of a layer take")
    assert text.endswith("less than in 24 × 1 (d1 across nodes, d2 inside a node).")
    assert "less in 3 × 8, but the spec asks for this shape" in reason(plain, "Tensor 24 × 1")
    assert "tensor 24 (3 × 8)" in summary(chosen.layout)


def test_reasons_give_the_price_of_other_forms() -> None:
    plan = plan_of(gpus(8))
    assert "GiB" in reason(plan, "Norms on ")
    assert reason(plan, "Tensor overlap none").endswith("as the compiler, or halved passes, order them.")
    pinned = plan_of(gpus("{degree: 8, overlap: backward, chunks: 2}"))
    assert (pinned.layout.compile, pinned.layout.tensor.overlap, pinned.layout.tensor.chunks) == ("none", "backward", 2)
    assert reason(pinned, "Tensor overlap backward") == "Tensor overlap backward: the spec asks for it."
    eager = plan_of(gpus(8, more=", compile: none"))
    assert eager.layout.tensor.overlap == "backward"
    on_cpu = plan_of(cpu(2, 2))
    assert on_cpu.layout.tensor.overlap == "none"
    assert "the same cores" in reason(on_cpu, "Tensor overlap none")
    shared = plan_of(gpus(8, kv=4))
    assert "4 heads on 8 tensor ranks" in reason(shared, "Keys and values")


@pytest.mark.parametrize(
    "tensor", [3, "{degree: 3, sequence_norms: true}", "{degree: 3, chunks: 2, overlap: backward}"]
)
def test_a_plans_own_change_gives_it_again(tensor: Any) -> None:
    first = plan_of(cpu(3, tensor))
    again = plan_of(CPU.replace("RANKS", "3") + own_yaml(first))
    assert again.layout == first.layout
    assert summary(again.layout) == summary(first.layout)


def test_fused_collectives_are_planned_not_run() -> None:
    plan = plan_of(gpus("{degree: 8, overlap: symmetric}"))
    assert (plan.not_runnable, plan.layout.tensor.sequence_norms) == (("PT401",), True)


def told(text: str) -> list[str]:
    """Return the fields reported to have no effect with one tensor rank."""
    spec = load_text(text).spec
    assert spec is not None
    found = make_plan(spec, base_dir=Path("/spec-folder"), default_name="spec").diagnostics
    return [one.path[-1] for one in found if one.code == "PT446"]  # type: ignore[misc]


def test_what_one_tensor_rank_has_no_use_for_is_told() -> None:
    fields = "sequence_norms: true, overlap: backward, chunks: 2"
    assert told(cpu(2, f"{{degree: 1, {fields}}}")) == ["sequence_norms", "overlap", "chunks"]
    assert told(cpu(2, "{degree: 1, sequence_norms: false, overlap: none, chunks: 1}")) == []
    assert told(cpu(2, f"{{degree: 2, {fields}}}")) == []
    # The planner's choice: two tensor ranks over a CPU's links would be slower.
    open_degree = cpu(2, f"{{degree: auto, {fields}}}")
    assert plan_of(open_degree).layout.mesh.tp == 1
    assert told(open_degree) == ["sequence_norms", "overlap", "chunks"]


def test_schedules_that_halve_passes_leave_nothing_to_overlap() -> None:
    text = gpus("{degree: 2, overlap: backward}", kv=32).replace("pipeline: 1", "pipeline: {stages: 2, schedule: NAME}")
    whole, halved = (plan_of(text.replace("NAME", name)) for name in ("1f1b", "zb-h1"))
    assert reason(whole, "Tensor overlap") == "Tensor overlap backward: the spec asks for it."
    assert "backward passes have none to compute meanwhile" in reason(halved, "Tensor overlap")


PIPELINED = """\
model: {layers: 126, hidden: 16384, ffn_hidden: 53248, heads: 128, kv_heads: 8, vocab: 128256, max_position: 131072}
hardware: {accelerator: h100-sxm, nodes: 2048}
data: python-stdlib
training: {sequence_length: 8192, global_batch: 2048}
parallel:
  data: {zero: 1}
  tensor: {degree: 8, sequence_norms: true}
  pipeline: {stages: 16, schedule: interleaved, chunks: 4}
  sequence: 1
  micro_batch: 1
  recompute: none
  offload: {optimizer: none, parameters: none, activations: none}
"""
"""Llama 3 405B as it was trained on 8,192 tokens without recomputation (arXiv 2407.21783, section 3.3.2)."""


def test_blocks_that_gather_inputs_again_are_tried_beside_compiled_ones() -> None:
    """Compiled blocks keep the gathered inputs of two products per layer: two hidden states of 16 bits per token."""
    problem = problem_of(PIPELINED.replace("nodes: 2048", "nodes: 2048, memory_gib: 400"))
    space = build(problem)
    assert np.asarray(space.groups.compiled).tolist() == [1, 0]
    kept, again = (Priced(problem, layout_of(problem, space.rows(group, 0))) for group in (0, 1))
    assert (kept.layout.compile, again.layout.compile) == ("block", "none")
    # All 16 micro-batches of the second rank's four chunks of two layers are in flight at once.
    rank = (one.memory.ranks[1].terms_bytes["activations"] for one in (kept, again))
    passes, per_layer = 16 * 4, 2 * 8192 * 16384 * 2 * (1 - 1 / 8)
    assert next(rank) - next(rank) == pytest.approx(2 * passes * per_layer, rel=0.03)
    assert again.memory.total_bytes < 79 * GIB < 0.7 * kept.memory.total_bytes
    assert kept.step_time_s < again.step_time_s < 1.1 * kept.step_time_s
    solution = solve(problem_of(PIPELINED, "limits.memory_headroom=0.02"))
    assert solution.chosen is not None
    assert solution.chosen.layout.compile == "none"
    compared = settings.compiled(solution, solution.chosen)
    assert compared is not None
    said = settings.sentence(solution.chosen, compared)
    assert re.fullmatch(r"Compile none: with block, this layout would need 13\d\.\d of 7\d\.\d GiB\.", said)
    for change in ("parallel.compile=block", "parallel.tensor.sequence_norms=false"):
        alone = np.asarray(build(problem_of(PIPELINED, change)).groups.compiled)
        assert set(alone.tolist()) == {1}
