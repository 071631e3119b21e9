"""Specs with ``model: {hf: DIR}`` are planned from the runtime's description of the model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from partool.catalog import transformers_process
from partool.layout.tensor.structure import Structure, StructureModule
from partool.planner import make_plan
from partool.planner.make import PlanResult
from partool.spec import load_text

HIDDEN, WIDTH, VOCAB, LAYERS = 32, 40, 300, 2
FIELDS = {
    "layers": LAYERS, "hidden": HIDDEN, "ffn_hidden": WIDTH, "heads": 4, "kv_heads": 4, "head_dim": 8, "vocab": VOCAB,
    "tied_embeddings": False,
}  # fmt: skip


ATTENTION = [
    {
        "module": f"layers.{n}.self_attn",
        "line": "",
        "heads": 4,
        "key_heads": 2,
        "head_dim": 8,
        "sees": "all earlier tokens",
    }
    for n in range(2)
]


def structure() -> Structure:
    """Return the structure of a Llama of two layers."""
    attention, network = "model.layers.{}.self_attn", "model.layers.{}.mlp"
    modules = [("model.embed_tokens", "embedding", (VOCAB, HIDDEN))]
    for layer in range(LAYERS):
        modules += [(f"model.layers.{layer}.input_layernorm", "norm", (HIDDEN,))]
        modules += [(f"{attention.format(layer)}.{n}_proj", "linear", (HIDDEN, HIDDEN)) for n in "qkvo"]
        modules += [(f"model.layers.{layer}.post_attention_layernorm", "norm", (HIDDEN,))]
        modules += [(f"{network.format(layer)}.{n}_proj", "linear", (WIDTH, HIDDEN)) for n in ("gate", "up")]
        modules += [(f"{network.format(layer)}.down_proj", "linear", (HIDDEN, WIDTH))]
    modules += [("model.norm", "norm", (HIDDEN,)), ("lm_head", "linear", (VOCAB, HIDDEN))]
    return Structure(
        model_type="llama",
        architecture="LlamaForCausalLM",
        modules=tuple(
            StructureModule(name=name, class_name="X", kind=kind, parameters={"weight": shape})  # type: ignore[arg-type]
            for name, kind, shape in modules
        ),
        blocks="model.layers",
        embedding="model.embed_tokens",
        head="lm_head",
        hidden=HIDDEN,
        heads=4,
        kv_heads=4,
        head_dim=8,
    )


def planned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    parallel: str = "{}",
    model: str = "",
    *,
    data: str = "python-stdlib",
    graph: str | None = None,
    **said: Any,
) -> PlanResult:
    """Plan a spec whose model the runtime describes as a Llama, with ``said`` replacing fields of the description.

    ``graph`` is why the model's graph cannot be shared, empty if it can; None means that nobody may ask.
    """
    (tmp_path / "m").mkdir(exist_ok=True, parents=True)
    (tmp_path / "m" / "config.json").write_text("{}")
    found = {
        "structure": structure().model_dump(mode="json"),
        "fields": FIELDS,
        "head_problem": "",
        "pipeline_problem": "",
        "draws": False,
        "auxiliary_loss": False,
    }
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))

    def answer(module: str, *arguments: str) -> dict[str, Any]:
        if module.endswith("structure"):
            return found | said
        assert graph is not None, "asked for the graph"
        return {"problem": graph, "attention": ATTENTION}

    monkeypatch.setattr(transformers_process, "_answer", answer)
    text = f"model: {{hf: m{model}}}\nparallel: {parallel}\nhardware: {{accelerator: cpu, per_node: 2}}\n"
    text += f"data: {data}\ntraining: {{steps: 2, sequence_length: 16, global_batch: 4}}\n"
    loaded = load_text(text)
    assert loaded.spec is not None, loaded.diagnostics
    return make_plan(loaded.spec, base_dir=tmp_path, default_name="x")


def codes(result: PlanResult) -> set[str]:
    return {found.code for found in result.diagnostics}


def test_plans_carry_the_model_and_its_partition(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert codes(planned(monkeypatch, tmp_path, "{tensor: 2}", ", weights: {source: hf}")) == {"PT620"}
    (tmp_path / "m" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    result = planned(monkeypatch, tmp_path, "{tensor: 2}", ", weights: {source: hf}")
    plan = result.plan
    assert plan is not None
    assert plan.runnable, result.diagnostics
    assert plan.hf is not None
    assert (plan.hf.path, plan.hf.architecture) == (str(tmp_path / "m"), "LlamaForCausalLM")
    assert plan.weights.path == str(tmp_path / "m")
    assert plan.layout.compile == "none"
    styles = {row.name: row.style for row in plan.partition}
    assert styles["model.layers.*.self_attn.o_proj.weight"] == "row"
    assert styles["lm_head.weight"] == "vocabulary"
    assert "model.hf" in plan.inputs


def test_the_runtime_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert planned(monkeypatch, tmp_path).plan is not None
    kept = list((tmp_path / "home" / "models").iterdir())
    assert len(kept) == 1
    assert json.loads(kept[0].read_text())["fields"]["hidden"] == HIDDEN
    monkeypatch.setattr(transformers_process, "_answer", lambda module, *arguments: pytest.fail("asked again"))
    transformers_process.describe(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"other": 1}')
    monkeypatch.setattr(transformers_process, "_answer", lambda module, *arguments: {"fields": {}})
    assert transformers_process.describe(tmp_path / "m")[0] == {"fields": {}, "code_hash": ""}


@pytest.mark.parametrize(
    ("parallel", "said", "code"),
    [
        ("{}", {"head_problem": "it caps"}, "PT452"),
        ("{pipeline: 2}", {"pipeline_problem": "it looks up wpe"}, "PT453"),
        ("{compile: block}", {}, "PT454"),
        ("{tensor: {degree: 2, sequence_norms: true}}", {}, "PT454"),
        ("{tensor: {degree: 2, shape: [1, 2]}}", {}, "PT454"),
        ("{pipeline: {stages: 2, schedule: weipipe}}", {}, "PT454"),
        ("{tensor: {degree: 2, overlap: symmetric}}", {}, "PT454"),
        ("{sequence: 2}", {"attention_problem": "its attention uses s_aux", "graph": "it mixes tokens"}, "PT483"),
        ("{sequence: {method: ring, degree: 2}}", {"attention_problem": "its attention uses s_aux"}, "PT483"),
        ("{sequence: {method: compiled, degree: 2}}", {"graph": "it mixes tokens"}, "PT448"),
        ("{sequence: {method: ring, degree: 2}}", {"attention_dropout": 0.1}, "PT484"),
        ("{sequence: {method: all_gather}}", {"attention_dropout": 0.1}, "PT484"),
        ("{data: {zero: 3, leaves: ['*.mpl']}}", {}, "PT461"),
        ("{pipeline: 2, data: {leaves: ['*.mlp.*_proj', '*.expert']}}", {}, "PT461"),
    ],
)
def test_what_such_a_model_cannot_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parallel: str, said: dict[str, Any], code: str
) -> None:
    result = planned(monkeypatch, tmp_path, parallel, **said)
    assert result.plan is None
    assert [found.code for found in result.diagnostics if found.severity == "error"] == [code]


def test_graphs_serve_models_that_have_no_other_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = planned(monkeypatch, tmp_path, "{sequence: 2}", graph="", attention_problem="it computes with masks")
    assert found.plan is not None, found.diagnostics
    assert found.plan.layout.sequence.method == "compiled"
    reasons = " ".join(found.plan.reasons)
    assert "Attention in the graph: 2 × 4 heads of 8, 2 of keys, to all earlier tokens" in reasons
    assert "Not here: ulysses, ring" in reasons
    # Other models are asked for their graphs only if the spec says so, and then have it.
    seam = planned(monkeypatch, tmp_path / "seam", "{sequence: 2}")
    assert seam.plan is not None
    assert seam.plan.layout.sequence.method != "compiled"
    assert "compiled" not in " ".join(seam.plan.reasons)
    asked = planned(monkeypatch, tmp_path / "asked", "{sequence: {method: compiled, degree: 2}}", graph="")
    assert asked.plan is not None
    assert (asked.plan.layout.sequence.method, asked.plan.runnable) == ("compiled", True)
    like = planned(monkeypatch, tmp_path / "like", "{sequence: {method: ulysses, degree: 2}}")
    assert like.plan is not None
    sent = [plan.prediction.time.traffic_bytes["sequence"] for plan in (asked.plan, like.plan)]
    assert sent[0] == sent[1]


def test_a_process_that_fails_to_show_the_graph_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert planned(monkeypatch, tmp_path).plan is not None  # the model's description is kept from here on

    def fail(module: str, *arguments: str) -> dict[str, Any]:
        raise transformers_process.DescriptionError("the runtime could not inspect the model: killed")

    monkeypatch.setattr(transformers_process, "_answer", fail)
    loaded = load_text(
        "model: {hf: m}\nparallel: {sequence: {method: compiled, degree: 2}}\ndata: {source: python-stdlib}\n"
        "hardware: {accelerator: cpu, per_node: 2}\ntraining: {steps: 2, sequence_length: 16, global_batch: 4}\n"
    )
    assert loaded.spec is not None, loaded.diagnostics
    result = make_plan(loaded.spec, base_dir=tmp_path, default_name="x")
    (error,) = [found for found in result.diagnostics if found.severity == "error"]
    assert error.code == "PT448"
    assert "killed" in error.message


@pytest.mark.parametrize(
    "parallel",
    [
        "{sequence: {method: compiled, degree: 1}, tensor: 2}",
        "{sequence: {method: compiled, degree: 2}, tiles: {mlp: 4}}",
    ],
)
def test_what_a_graph_cannot_be_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parallel: str) -> None:
    result = planned(monkeypatch, tmp_path, parallel, graph="")
    shared = "degree: 2" in parallel
    assert result.plan is not None, result.diagnostics
    assert result.plan.runnable is not shared
    assert ("PT449" in codes(result)) is shared


def test_a_graph_is_for_models_of_other_code() -> None:
    text = "model: {layers: 2, hidden: 64, heads: 4, vocab: 300}\nhardware: {accelerator: cpu, per_node: 2}\n"
    text += "data: {source: python-stdlib}\ntraining: {steps: 2, sequence_length: 16, global_batch: 4}\n"
    loaded = load_text(text + "parallel: {sequence: {method: compiled, degree: 2}}\n")
    assert loaded.spec is not None, loaded.diagnostics
    result = make_plan(loaded.spec, base_dir=Path(), default_name="x")
    assert result.plan is None
    (error,) = [found for found in result.diagnostics if found.severity == "error"]
    assert "partool's own decoder has ulysses" in error.message


def test_leaves_are_modules_that_are_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modules = (*structure().modules, StructureModule(name="model.layers", class_name="ModuleList", kind="other"))
    said = structure().model_copy(update={"modules": modules}).model_dump(mode="json")
    result = planned(monkeypatch, tmp_path, "{data: {zero: 3, leaves: ['*.mlp', 'model.layers']}}", structure=said)
    (found,) = [one for one in result.diagnostics if one.severity == "error"]
    assert (found.code, "'model.layers' is a container" in found.message) == ("PT461", True)


def test_leaves_of_a_module_are_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = planned(monkeypatch, tmp_path, "{tensor: 1, pipeline: 1, data: {zero: 3, leaves: ['*.mlp']}}")
    assert result.plan is not None, result.diagnostics
    assert result.plan.layout.data.leaves == ("*.mlp",)


def test_weights_beside_the_model_that_nobody_asks_for_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "PT447" not in codes(planned(monkeypatch, tmp_path))
    (tmp_path / "m" / "model.safetensors").touch()
    assert "PT447" in codes(planned(monkeypatch, tmp_path))
    assert "PT447" not in codes(planned(monkeypatch, tmp_path, model=", weights: {source: init}"))
    assert "PT447" not in codes(planned(monkeypatch, tmp_path, model=", weights: {source: hf}"))


def test_fields_beside_the_folder_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = planned(monkeypatch, tmp_path, model=", layers: 3")
    assert result.plan is None
    assert codes(result) == {"PT454"}


def test_models_that_cannot_be_cut_get_one_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = planned(monkeypatch, tmp_path, pipeline_problem="it looks up wpe")
    assert result.plan is not None
    assert result.plan.layout.mesh.pp == 1
    assert all("pipeline" not in row.summary for row in result.plan.candidates)


def test_models_share_sequences_where_their_attention_can_be_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for method in ("ulysses", "ring", "all_gather"):
        plan = planned(monkeypatch, tmp_path, f"{{sequence: {{method: {method}, degree: 2}}}}").plan
        assert plan is not None
        assert (plan.layout.mesh.cp, plan.layout.sequence.method, plan.runnable) == (2, method, True)
    dropping = planned(monkeypatch, tmp_path / "dropping", "{sequence: 2}", attention_dropout=0.1)
    assert dropping.plan is not None
    assert dropping.plan.layout.sequence.method == "ulysses"
    said = {"attention_problem": "its attention uses s_aux"}
    alone = planned(monkeypatch, tmp_path / "alone", graph="it mixes tokens", **said)
    assert alone.plan is not None
    assert alone.plan.layout.mesh.cp == 1


def test_documents_need_attention_that_can_be_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = "{source: python-stdlib, attend: document}"
    assert "PT483" not in codes(planned(monkeypatch, tmp_path, data=data))
    said = {"attention_problem": "its layers compute with masks themselves"}
    result = planned(monkeypatch, tmp_path / "refused", data=data, graph="", **said)
    (found,) = [found for found in result.diagnostics if found.severity == "error"]
    assert (found.code, found.path) == ("PT483", ("data", "attend"))
    shared = "{sequence: {method: compiled, degree: 2}}"
    assert "PT483" not in codes(planned(monkeypatch, tmp_path / "graph", shared, data=data, graph="", **said))


def test_differences_in_size_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = planned(monkeypatch, tmp_path, fields=FIELDS | {"ffn_hidden": 80}, auxiliary_loss=True)
    assert result.plan is not None
    told = [found.message for found in result.diagnostics if found.code == "PT451"]
    assert len(told) == 2
    assert "balances experts" in told[0]
    assert "parameters" in told[1]


def test_what_the_runtime_says_is_wrong_keeps_its_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = {"error": {"code": "PT649", "message": "it keeps state in buffers", "help": "choose another"}}
    done = subprocess.CompletedProcess([], 78, stdout=json.dumps(said), stderr="")
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: done)
    (tmp_path / "config.json").write_text("{}")
    loaded = load_text("model: {hf: .}\nhardware: {accelerator: cpu, per_node: 1}\ndata: python-stdlib\n")
    assert loaded.spec is not None
    (found,) = make_plan(loaded.spec, base_dir=tmp_path, default_name="x").diagnostics
    assert (found.code, found.message, found.help) == ("PT649", "it keeps state in buffers", "choose another")
    assert not (tmp_path / "home" / "models").exists(), "errors are not kept"


def test_folders_without_a_model(tmp_path: Path) -> None:
    loaded = load_text("model: {hf: nowhere}\nhardware: {accelerator: cpu, per_node: 1}\ndata: python-stdlib\n")
    assert loaded.spec is not None
    result = make_plan(loaded.spec, base_dir=tmp_path, default_name="x")
    assert codes(result) == {"PT450"}


def test_a_folder_that_is_not_there_is_told_with_what_it_must_be(tmp_path: Path) -> None:
    loaded = load_text("model: {hf: Qwen/none}\nhardware: {accelerator: cpu, per_node: 1}\ndata: python-stdlib\n")
    assert loaded.spec is not None
    (found,) = make_plan(loaded.spec, base_dir=tmp_path, default_name="x").diagnostics
    assert found.code == "PT450"
    assert "not looked up" in found.help
