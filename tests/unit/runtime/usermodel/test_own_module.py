"""Specs with ``model: {module: package:Class}``: what is built, what is read from it, what is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from partool.catalog import transformers_process
from partool.plan.types import ModuleModel
from partool.planner import make_plan
from partool.planner.make import PlanResult
from partool.spec import load_text
from partool.spec.model_code import module_file, module_hash
from partool_runtime.errors import ConfigurationError
from partool_runtime.model.loss import loss, loss_of_logits
from partool_runtime.usermodel import structure
from partool_runtime.usermodel.building import build_module, built_weights
from partool_runtime.usermodel.model import ModuleDecoder

NET = """
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class Net(nn.Module):
    def __init__(self, width=64, layers=3, vocab=300, positions=128):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
    def forward(self, tokens):
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

class Buffered(Net):
    def __init__(self, **given):
        super().__init__(**given)
        self.register_buffer("seen", torch.zeros(3))

class Twice(Net):
    def __init__(self, **given):
        super().__init__(**given)
        self.layers.append(self.layers[0])

class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8)
    def forward(self, tokens):
        return self.embed(tokens)

class Sums(Net):
    def forward(self, tokens):
        return super().forward(tokens).cumsum(1)

class Branches(Net):
    def forward(self, tokens):
        return super().forward(tokens) if tokens.sum() > 0 else self.head(self.embed(tokens))

def function(tokens):
    return tokens
"""


def named(folder: Path, name: str = "net:Net", **config: Any) -> ModuleModel:
    """Return the record of a class of this file's module, which is written into ``folder``."""
    file = folder / "net.py"
    if not file.exists():
        file.write_text(NET, encoding="utf-8")
    return ModuleModel(module=name, config=config, folder=str(folder), files={file.name: module_hash(file)})


def describe(model: ModuleModel, length: int = 16) -> dict[str, Any]:
    return structure.describe(model.model_dump_json(), length)


@pytest.fixture(autouse=True)
def _fresh_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "net", raising=False)


def test_sizes_are_read_from_the_graph(tmp_path: Path) -> None:
    found = describe(named(tmp_path))
    assert found["graph_problem"] == ""
    assert found["fields"] == {
        "layers": 3, "hidden": 64, "ffn_hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 300,
        "max_position": 128, "norm": "layernorm", "activation": "gelu", "position": "learned",
        "tied_embeddings": False,
    }  # fmt: skip
    assert [each["module"] for each in found["graph_attention"]] == ["layers.0", "layers.1", "layers.2"]
    assert {each["sees"] for each in found["graph_attention"]} == {"all earlier tokens"}
    assert found["structure"]["blocks"] == "layers"


def test_first_values_are_those_of_the_class(tmp_path: Path) -> None:
    model = named(tmp_path, layers=1)
    before = torch.random.get_rng_state()
    first, again, other = (built_weights(model, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert bool((first["norm.weight"] == 1).all())
    assert all(parameter.is_meta for parameter in build_module(model).parameters())


def test_the_decoder_and_the_module_are_one(tmp_path: Path) -> None:
    from partool.spec.model import ModelConfig

    record = named(tmp_path, layers=2)
    config = ModelConfig.model_validate(describe(record)["fields"])
    model = ModuleDecoder(record, config, seed=1).to_empty(device="cpu")
    weights = built_weights(record, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    assert set(model.whole_shapes()) == set(dict(model.named_parameters())) == set(weights)
    tokens = torch.arange(14).reshape(2, 7)
    labels = tokens.roll(-1, 1)
    labels[0, :3] = -100
    logits = model.base(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert torch.allclose(model(tokens, labels), expected)
    groups = model.groups()
    assert [group[0] for group in groups[:-1]] == list(model.layers)
    held = {parameter for group in groups for module in group for parameter in module.parameters()}
    assert held == set(model.parameters())


def test_the_loss_of_logits_is_the_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, head = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 5, 6), (9, 6)))
    labels = torch.randint(9, (2, 5), generator=generator)
    labels[1, 2:] = -100
    for how in ({}, {"z_loss": 0.3}, {"tile": 3}, {"tile": 4, "z_loss": 0.1}):
        expected = loss(hidden, head, labels, **how)  # type: ignore[arg-type]
        assert torch.allclose(loss_of_logits(hidden @ head.T, labels, **how), expected, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "config", "code", "why"),
    [
        ("net:Missing", {}, "PT655", "has no attribute 'Missing'"),
        ("net:function", {}, "PT655", "is no class"),
        ("net:Net", {"depth": 3}, "PT655", "unexpected keyword argument 'depth'"),
        ("net:Buffered", {}, "PT649", "seen"),
        ("net:Flat", {}, "PT655", "no nn.ModuleList"),
        ("net:Twice", {}, "PT655", r"Twice: layers\.0 and layers\.3 are one module"),
        ("net:Branches", {}, "PT655", "Data-dependent"),
        ("net:Net", {"layers": 0}, "PT655", "no nn.ModuleList"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, config: dict[str, Any], code: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as raised:
        describe(named(tmp_path, name, **config))
    assert raised.value.code == code


def test_a_module_that_mixes_tokens_trains_on_whole_sequences_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = describe(named(tmp_path, "net:Sums"))
    assert re.search(r"cumsum works along the tokens.*net\.py:", found["graph_problem"])
    alone = planned(monkeypatch, tmp_path, 'model: {module: "net:Sums"}\n')
    assert alone.plan is not None, alone.diagnostics
    assert alone.plan.layout.mesh.cp == 1
    shared = planned(monkeypatch, tmp_path, 'model: {module: "net:Sums"}\nparallel: {sequence: 2}\n')
    (error,) = [each for each in shared.diagnostics if each.severity == "error"]
    assert error.code == "PT483"
    assert "cumsum works along the tokens" in error.message


def test_another_file_is_refused(tmp_path: Path) -> None:
    record = named(tmp_path)
    (tmp_path / "net.py").write_text(NET + "# changed\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="not the one that was allowed") as raised:
        build_module(record)
    assert raised.value.code == "PT591"


def test_files_are_found_without_running_code(tmp_path: Path) -> None:
    package = tmp_path / "nets" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "nets" / "__init__.py").write_text("raise SystemExit", encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "net.py").write_text(NET, encoding="utf-8")
    assert module_file("nets.inner.net", str(tmp_path)) == package / "net.py"
    assert module_file("nets", str(tmp_path)) == tmp_path / "nets" / "__init__.py"
    for missing in ("nets.other", "nowhere", "nets.inner.net.deeper"):
        with pytest.raises(OSError, match="no module"):
            module_file(missing, str(tmp_path))


def planned(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *, allowed: bool = True) -> PlanResult:
    """Plan a spec with the file's module, as the runtime describes it in this process."""
    named(folder)

    def answer(module: str, model: str, length: str) -> dict[str, Any]:
        assert module == "partool_runtime.usermodel.structure"
        return structure.describe(model, int(length))

    monkeypatch.setenv("PARTOOL_HOME", str(folder / "home"))
    monkeypatch.setattr(transformers_process, "_answer", answer)
    monkeypatch.setattr(transformers_process, "code_allowed", lambda: allowed)
    common = "hardware: {accelerator: cpu, per_node: 2}\ndata: {source: python-stdlib}\n"
    common += "training: {steps: 2, sequence_length: 16, global_batch: 4}\n"
    loaded = load_text(common + text)
    assert loaded.spec is not None, loaded.diagnostics
    return make_plan(loaded.spec, base_dir=folder, default_name="x")


def test_plans_hold_the_module_and_its_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = 'model: {module: "net:Net", config: {layers: 2}}\nparallel: {sequence: 2}\n'
    result = planned(monkeypatch, tmp_path, spec)
    plan = result.plan
    assert plan is not None, result.diagnostics
    assert plan.module == named(tmp_path, layers=2)
    assert (plan.hf, plan.own_decoder, plan.code) == (None, False, "net:Net")
    assert (plan.layout.sequence.method, plan.layout.mesh.cp, plan.runnable) == ("compiled", 2, True)
    assert plan.layout.mesh.tp == plan.layout.mesh.pp == 1
    assert "model.module" in plan.inputs
    kept = list((tmp_path / "home" / "models").iterdir())
    assert len(kept) == 1
    assert json.loads(kept[0].read_text())["fields"]["layers"] == 2
    assert plan.module.files == {"net.py": module_hash(tmp_path / "net.py")}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose module is described once, for specs that differ in what they ask of it."""
    return tmp_path_factory.mktemp("described")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('model: {module: "net:Net"}\nparallel: {tensor: 2}\n', "PT454"),
        ('model: {module: "net:Net"}\nparallel: {pipeline: 2}\n', "PT453"),
        ('model: {module: "net:Net"}\nparallel: {sequence: {method: ulysses, degree: 2}}\n', "PT483"),
        ('model: {module: "net:Net"}\nparallel: {compile: block}\n', "PT454"),
        ('model: {module: "net:Net"}\noptimizer: {name: muon}\n', "PT241"),
        ('model: {module: "net:Net", hidden: 64}\n', "PT454"),
        ('model: {module: "net:Net", config: config.json}\n', "PT201"),
        ('model: {module: "lost:Net"}\n', "PT655"),
        ('model: {module: "net:Net", hf: folder}\n', "PT201"),
        ("model: {config: {layers: 2}}\n", "PT201"),
        ('model: {module: "net.Net"}\n', "PT106"),
    ],
)
def test_what_a_spec_cannot_ask(monkeypatch: pytest.MonkeyPatch, described: Path, text: str, code: str) -> None:
    common = "hardware: {accelerator: cpu, per_node: 2}\ndata: {source: python-stdlib}\n"
    common += "training: {steps: 2, sequence_length: 16, global_batch: 4}\n"
    loaded = load_text(common + text)
    found = loaded.diagnostics if loaded.spec is None else planned(monkeypatch, described, text).diagnostics
    errors = {each.code for each in found if each.severity == "error"}
    assert code in errors, found


def test_another_method_is_answered_with_the_one_that_serves(monkeypatch: pytest.MonkeyPatch, described: Path) -> None:
    spec = 'model: {module: "net:Net"}\nparallel: {sequence: {method: ring, degree: 2}}\n'
    (error,) = [found for found in planned(monkeypatch, described, spec).diagnostics if found.severity == "error"]
    assert "method: compiled" in error.help


def test_code_that_is_not_allowed_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = planned(monkeypatch, tmp_path, 'model: {module: "net:Net"}\n', allowed=False)
    (error,) = [found for found in result.diagnostics if found.severity == "error"]
    assert error.code == "PT590"
    assert not (tmp_path / "home").exists()


def test_errors_of_the_process_keep_their_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = {"error": {"code": "PT655", "message": "it cannot be built", "help": "look"}}
    done = subprocess.CompletedProcess([], 78, stdout=json.dumps(said), stderr="")
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(transformers_process, "code_allowed", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: done)
    with pytest.raises(transformers_process.DescriptionError, match="cannot be built") as raised:
        transformers_process.describe_module(named(tmp_path).model_dump(mode="json"), 16)
    assert raised.value.code == "PT655"
