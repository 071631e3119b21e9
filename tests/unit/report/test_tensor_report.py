"""``partool plan --show tensor``, and the planner's rules about how tensor ranks share parameters."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _families import structure
from planned import plan_of, spec_of
from rich.console import Console

from partool.cli.main import run
from partool.layout.tensor import Structure, decide
from partool.plan.diff import differences
from partool.planner.described import Description
from partool.planner.make import make_plan
from partool.planner.resolve import resolve
from partool.planner.rules.tensor_cuts import check_tensor, cuttable, without_tensor
from partool.planner.search.enumeration import build
from partool.report.tensor import rank_elements, render_tensor, tensor_data

TEXT = """\
model: {layers: 3, hidden: 64, heads: 7, head_dim: 8, vocab: 257, qk_norm: true}
hardware: {accelerator: h100-sxm, per_node: 4}
data: python-stdlib
training: {global_batch: 12, sequence_length: 32}
"""


def shown(plan: Any, width: int = 120) -> str:
    out = io.StringIO()
    render_tensor(plan, Console(file=out, width=width, color_system=None))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def test_screen() -> None:
    plan = plan_of(TEXT.replace("per_node: 4", "per_node: 3") + "parallel: {tensor: 3}\n")
    text = shown(plan)
    assert "Why\nall parameters: preset partool\nembed.weight, head.weight: tokens over all ranks\n" in text
    assert "q.weight, k.weight, v.weight: whole heads\n" in text
    assert text.endswith("Elements of 187 k by rank: 66.8 k (35.7%), 66.8 k (35.7%), 54.4 k (29.1%)\n")
    assert max(map(len, shown(plan_of(TEXT + "parallel: {tensor: 2}\n"), 80).splitlines())) <= 80


def test_shared_heads_and_several_parts_are_told_apart() -> None:
    text = TEXT.replace("heads: 7", "heads: 8, kv_heads: 2").replace("257", "256") + "parallel: {tensor: 4}\n"
    lines = {line.split()[0]: " ".join(line.split()[2:]) for line in shown(plan_of(text)).splitlines() if " " in line}
    assert lines["layers.*.attention.k.weight"] == "column, gradients summed rows 8 each, on 2 ranks"
    assert lines["layers.*.attention.q.weight"] == "column rows 16 each"
    plan = plan_of(TEXT + "parallel: {tensor: 2}\n")
    hf = plan.model_copy(update={"partition": decide(structure("phi3"), 2, {}).rows})
    lines = {line.split()[0]: " ".join(line.split()[2:]) for line in shown(hf).splitlines() if " " in line}
    assert lines["model.layers.*.self_attn.qkv_proj.weight"] == "column rows 32+16+16, 16+8+8 preset phi3"
    assert lines["lm_head.weight"] == "vocabulary rows 34, 33 tp_plan"


def test_one_rank() -> None:
    assert shown(plan_of(TEXT + "parallel: {tensor: 1}\n")).startswith("One tensor rank holds every parameter whole")


def test_as_data() -> None:
    plan = plan_of(TEXT.replace("heads: 7", "heads: 8, kv_heads: 2") + "parallel: {tensor: 4}\n")
    data = json.loads(json.dumps(tensor_data(plan)))
    assert (data["ranks"], data["shape"]) == (4, [4, 1])
    rows = {row["name"]: row for row in data["parameters"]}
    key = rows["layers.*.attention.k.weight"]
    assert (key["count"], key["style"], key["gradients"], key["rule"]) == (3, "column", "summed", "preset partool")
    assert [one["shared_with"] for one in key["local"]] == [[1], [0], [3], [2]]
    assert key["local"][2] == {"shape": [8, 64], "ranges": [[[8, 16]], [[0, 64]]], "shared_with": [3]}
    assert data["elements"] == [rank_elements(plan.partition, rank) for rank in range(4)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(TEXT + "parallel: {tensor: 2}\n", encoding="utf-8")
    for extra, start in (([], "Parameters over 2 tensor ranks"), (["--output", "json"], "{")):
        with pytest.raises(SystemExit) as stopped:
            run(["plan", str(file), "--show", "tensor", *extra])
        assert stopped.value.code in (0, None)
        assert capsys.readouterr().out.startswith(start)


def found(text: str) -> dict[str, Any]:
    return {one.code: one for one in make_plan(spec_of(text), base_dir=Path("/"), default_name="example").diagnostics}


def test_idle_ranks_are_told() -> None:
    idle = TEXT.replace("heads: 7", "heads: 5") + "parallel: {tensor: 4}\n"
    finding = found(idle)["PT444"]
    assert finding.message.startswith("1 of 4 tensor ranks have no part of layers.*.attention.q.weight and of 2 more")
    assert finding.help == "use tensor: 3 or fewer"
    assert "PT444" not in found(idle.replace("tensor: 4", "tensor: 2"))
    assert "PT444" in {one.code for one in plan_of(idle).findings}


def test_patterns_of_the_spec_reach_the_plan() -> None:
    degree = "parallel: {tensor: {degree: 2, patterns: {PATTERN}}}\n"
    plan = plan_of(TEXT + degree.replace("PATTERN", '"*.ffn.down": row'))
    assert [row.rule for row in plan.partition if row.name == "layers.*.ffn.down.weight"] == ["pattern '*.ffn.down'"]
    wrong = found(TEXT + degree.replace("PATTERN", '"*.ffn.down": column, "*.ffn.middle": row'))
    assert wrong["PT443"].path == ("parallel", "tensor", "patterns", "*.ffn.down")
    assert wrong["PT440"].path == ("parallel", "tensor", "patterns", "*.ffn.middle")
    # Also where the degree is open, or one.
    for open_degree in ("auto", "1"):
        assert "PT440" in found(TEXT + degree.replace("2", open_degree, 1).replace("PATTERN", '"*.ffn.middle": row'))


def described(model: Structure) -> Description:
    return Description(structure=model, head_problem="", pipeline_problem="", draws=False, auxiliary_loss=False)


def unclear() -> Structure:
    return structure("phi3").model_copy(update={"model_type": "unheard_of", "tp_plan": {}})


def test_a_model_that_cannot_be_cut() -> None:
    problem = resolve(spec_of(TEXT + "parallel: {tensor: 2}\n"), Path("/")).problem
    assert problem is not None
    problem = replace(problem, description=described(unclear()))
    assert {one.code for one in check_tensor(problem)} == {"PT442"}
    assert list(check_tensor(replace(problem, description=described(structure("phi3"))))) == []


def test_an_open_degree_leaves_tensor_parallelism_out() -> None:
    text = spec_of(TEXT)
    narrow, findings = without_tensor(text, described(unclear()))
    assert narrow.parallel.tensor.degree == 1
    assert [one.code for one in findings] == ["PT445"]
    assert "qkv_proj cannot be cut" in findings[0].message
    assert "and 1 more" in findings[0].message
    assert without_tensor(text, described(structure("phi3"))) == (text, [])
    pinned = spec_of(TEXT + "parallel: {tensor: 2}\n")
    assert without_tensor(pinned, described(unclear())) == (pinned, [])


def test_an_open_degree_leaves_out_those_that_a_module_cannot_have() -> None:
    """Phi-3's fused matrix has three heads of keys and values: four ranks would share parts of it."""
    text = spec_of(TEXT.replace("heads: 7", "heads: 12, ffn_hidden: 48") + "parallel: {tensor: auto, compile: none}\n")
    problem = resolve(text, Path("/")).problem
    assert problem is not None
    problem = replace(problem, description=described(structure("phi3")))
    assert not cuttable(problem, 4)
    space = build(problem)
    assert 4 not in space.groups.tp
    assert 2 in space.groups.tp
    assert "modules that so many tensor ranks cannot share" in space.pruned
    assert 4 in build(replace(problem, description=described(structure("llama")))).groups.tp


def test_plans_that_share_parameters_otherwise_differ_in_one_line_each() -> None:
    plan = plan_of(TEXT + "parallel: {tensor: 2}\n")
    rows = list(plan.partition)
    told = plan.model_copy(update={"partition": tuple(row.model_copy(update={"rule": "pattern 'x'"}) for row in rows)})
    assert (differences(plan, told), plan.hash) == ([], told.hash)
    at = next(index for index, row in enumerate(rows) if row.name == "layers.*.ffn.down.weight")
    rows[at] = rows[at].model_copy(update={"style": "replicated", "cuts": ()})
    other = plan.model_copy(update={"partition": tuple(rows)})
    assert other.hash != plan.hash
    assert differences(plan, other) == [
        'partition.layers.*.ffn.down.weight: "row (gradients whole) dimension 1: 0-96, 96-192" → '
        '"replicated (gradients whole)"'
    ]
    # Other ranks need no line per parameter.
    alone = plan_of(TEXT + "parallel: {tensor: 4}\n")
    assert [line for line in differences(plan, alone) if "partition" in line] == []
