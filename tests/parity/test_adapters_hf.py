"""Adapters of models that transformers builds, in float64: its own code with summed matrices is the reference."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _adapter_worker import UNCHANGED, noise, train_adapter
from _hf_models import MODELS, plan_of
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import FIVE, HALVES, LENGTH, ONE, QUARTERS, tensor_plan
from often import often
from test_adapters import TOLERANCE, summed
from test_tensor_trainer import assert_same_state
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

from partool.layout.adapters import frozen_beside, is_adapter
from partool.layout.parameters import is_frozen
from partool.layout.tensor.adapters import shapes, short_names, with_adapters
from partool.plan.layout import Mesh
from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.adapter import AdapterSpec
from partool.spec.model import Weights
from partool.spec.training import CheckpointSpec
from partool_runtime.checkpoint import load_folder, step_folder
from partool_runtime.data import open_data
from partool_runtime.hf.building import build_causal
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.numerics import KeepWide
from partool_runtime.hf.peft import open_adapter, write_adapter
from partool_runtime.hf.structure import structure_of
from partool_runtime.merge import merged_weights, trained_weights
from partool_runtime.weights import fill, materialise
from partool_runtime.weights.chosen import ChosenWeights

transformers = pytest.importorskip("transformers")
STEPS = 10
ADAPTERS = {
    "qwen3_deep": AdapterSpec(rank=3, alpha=5.0, train=["norms"]),
    "qwen3_deep dora": AdapterSpec(kind="dora", rank=3, alpha=5.0),
    "phi3": AdapterSpec(rank=2, alpha=3.0, targets=("qkv_proj", "down_proj")),
    "phi3 dora": AdapterSpec(kind="dora", rank=2, alpha=3.0, targets=("qkv", "gate_up", "o")),
    "deepseek_v2": AdapterSpec(kind="dora", rank=2, alpha=3.0),
}
CORE = ("phi3 dora tensor",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models of transformers whose weights are random."""
    folder = tmp_path_factory.mktemp("models")
    common = {
        "num_hidden_layers": 4, "vocab_size": 257, "initializer_range": 0.2, "max_position_embeddings": 16,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    for name in {name.split()[0] for name in ADAPTERS}:
        config = transformers.CONFIG_MAPPING[name.removesuffix("_deep")](**MODELS[name] | common)
        torch.manual_seed(3)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        made.save_pretrained(folder / name)
    return folder


def adapter_plan(text: Path, folder: Path, name: str, mesh: Mesh, zero: int, **layout: Any) -> Plan:
    """Return a plan of ten steps of an adapter of a model in ``folder``."""
    adapter, path = ADAPTERS[name], folder / name.split(maxsplit=1)[0]
    settings = {"zero": zero, "steps": STEPS}
    base = tensor_plan(text, mesh, model=FIVE, settings=settings, stages=layout.get("stages"))
    fields = {"micro_batch": base.layout.micro_batch, "accumulation": base.layout.derived.accumulation}
    recompute = (layout.pop("recompute", "none"),) * 4
    plan = plan_of(base, path, mesh, zero=zero, recompute=recompute, **fields, **layout)
    structure = structure_of(build_causal(path))
    frozen = frozen_beside(list(shapes(structure, adapter.form)), adapter.train, short_names(structure))
    update = {
        "adapter": adapter, "frozen": frozen, "model": plan.model.model_copy(update={"adapter": adapter.form}),
        "partition": with_adapters(structure, adapter.form, plan.partition) if mesh.tp > 1 else (),
        "weights": Weights(source="hf", path=str(path)), "checkpoint": CheckpointSpec(every=0, keep=STEPS),
    }  # fmt: skip
    return plan.model_copy(update=update)


def cases(text: Path, folder: Path) -> dict[str, tuple[str, Mesh, int, dict[str, Any]]]:
    """Return model, mesh, ZeRO and fields of the layout by name."""
    del text, folder
    two, piped = Mesh(tp=2, dp_shard=2), Mesh(pp=2, dp_shard=2)
    chosen: dict[str, tuple[str, Mesh, int, dict[str, Any]]] = {}
    for name in ADAPTERS:
        chosen[f"{name} zero-3"] = (name, Mesh(dp_shard=2), 3, {})
        chosen[f"{name} tensor"] = (name, two, 1, {})
    return chosen | {
        "zero-0": ("qwen3_deep", Mesh(dp_replicate=2), 0, {}),
        "zero-2": ("qwen3_deep dora", Mesh(dp_shard=2), 2, {"recompute": "full"}),
        "zero-3 tensor": ("phi3 dora", two, 3, {"recompute": "selective"}),
        "three tensor ranks": ("qwen3_deep dora", Mesh(tp=3), 0, {}),
        "1f1b": ("qwen3_deep", piped, 1, {"stages": HALVES, "schedule": "1f1b"}),
        "zb-v tensor": (
            "qwen3_deep dora", Mesh(pp=2, tp=2), 0, {"stages": QUARTERS, "chunks": 2, "schedule": "zb-v"}
        ),
        "tiles": ("qwen3_deep dora", Mesh(dp_shard=2), 1, {"mlp_tile_tokens": 4}),
        "ring": ("phi3", Mesh(dp_shard=2, cp=2), 1, {"sequence_method": "ring", "sequence_order": "zigzag"}),
        "ulysses": ("qwen3_deep dora", Mesh(dp_shard=2, cp=2), 3, {"sequence_method": "ulysses"}),
    }  # fmt: skip


class Ran:
    """Runs of cases and references, each made when it is first asked for."""

    def __init__(self, jobs: Jobs, models: Path) -> None:
        self.jobs, self.models, self.text = jobs, models, jobs.folder / "text"
        write_text(self.text)
        self._done: set[str] = set()

    def run(self, name: str, plan: Plan) -> str:
        """Return the folder of the run of a plan."""
        if name not in self._done:
            self._done.add(name)
            self.jobs.train(name, plan, run=name)
        assert self.jobs.ended(name) == "done"
        return name

    def plan(self, model: str) -> Plan:
        """Return the plan of the run of one process."""
        return adapter_plan(self.text, self.models, model, ONE, 0)

    def reference(self, model: str) -> str:
        """Return the folder of the run of one process."""
        return self.run(f"reference {model}", self.plan(model))


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory, models: Path) -> Ran:
    return Ran(Jobs(tmp_path_factory.mktemp("adapters"), pools, train_adapter), models)


def by_transformers(plan: Plan, adapter: AdapterSpec) -> dict[str, torch.Tensor]:
    """Train in this process: a model of transformers, whose matrices are sums, and torch's own optimizer."""
    path = str(plan.weights.path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    drawn = noise(plan.training.seed)
    every = shapes(structure_of(build_causal(Path(path))), adapter.form)
    added = {n: drawn(n, s, (0,) * len(s), s).double() for n, s in every.items() if is_adapter(n)}
    first = dict(model.named_parameters())
    for name in [name for name in added if name.endswith(".magnitude")]:
        added[name] = first[name.replace("magnitude", "weight")].detach().norm(dim=1)
    weights = first | {n: torch.nn.Parameter(t) for n, t in added.items()}
    trained = {n: p for n, p in weights.items() if not is_frozen(n, plan.frozen)}
    spec, data = plan.optimizer, open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None)
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": spec.weight_decay * (p.ndim > 1)} for p in trained.values()],
        betas=(spec.betas[0], spec.betas[1]), eps=spec.eps, foreach=False,
    )  # fmt: skip
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = data.step(step)
        labels = sum(int((micro.labels_BS != -100).sum()) for micro in batch)
        for micro in batch:
            values = dict(weights)
            for name in [each.removesuffix(".lora_a") for each in added if each.endswith("lora_a")]:
                parts = (weights[f"{name}.lora_a"], weights[f"{name}.lora_b"], weights.get(f"{name}.magnitude"))
                values[f"{name}.weight"] = summed(weights[f"{name}.weight"], *parts, adapter, 1)
            of_model = {name: value for name, value in values.items() if not is_adapter(name)}
            with KeepWide():
                asked = {"input_ids": micro.tokens_BS, "use_cache": False}
                logits = functional_call(model, of_model, kwargs=asked, tie_weights=True).logits
            flat = logits.flatten(0, 1), micro.labels_BS.flatten()
            (torch.nn.functional.cross_entropy(*flat, reduction="sum") / labels).backward()
        norm = clip_grad_norm_(list(trained.values()), math.inf)
        torch._foreach_mul_([p.grad for p in trained.values()], min(1.0, spec.clip / float(norm)))
        for group in optimizer.param_groups:
            group["lr"] = spec.lr * lr_factor(spec.schedule, step, STEPS)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in trained.items()}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", often(ADAPTERS, ["phi3 dora"]))
def test_one_process_follows_summed_matrices(ran: Ran, model: str) -> None:
    state = ran.jobs.state(ran.reference(model), STEPS)
    expected = by_transformers(ran.plan(model), ADAPTERS[model])
    assert {key.removeprefix("model.") for key in state if key.startswith("model.") and "." in key} >= set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            state[f"model.{name}"], value, rtol=TOLERANCE, atol=TOLERANCE, msg=partial("{}: {}".format, name)
        )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", often(cases(Path("text"), Path("models")), CORE))
def test_training_equals_one_process(ran: Ran, name: str) -> None:
    model, mesh, zero, layout = cases(ran.text, ran.models)[name]
    plan = adapter_plan(ran.text, ran.models, model, mesh, zero, **layout)
    run = ran.run(name, plan)
    assert_same_state(ran.jobs, run, ran.reference(model), at=STEPS, of=STEPS, tolerance=TOLERANCE)
    for rank in range(mesh.world_size):
        unchanged = json.loads((ran.jobs.folder / run / UNCHANGED.format(rank)).read_text())
        assert [each for each, same in unchanged.items() if not same] == []


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_stopped_run_goes_on_in_another_layout(ran: Ran) -> None:
    sharded, cut = (
        adapter_plan(ran.text, ran.models, "qwen3_deep dora", mesh, zero)
        for mesh, zero in ((Mesh(dp_shard=2), 3), (Mesh(tp=2), 0))
    )
    ran.jobs.train("stopped", sharded, run="broken", stop_at=5)
    assert ran.jobs.ended("stopped", rank=1) == "Preempted: stopped by SIGTERM after step 5"
    ran.jobs.train("rest", cut, run="broken", resume=True)
    assert ran.jobs.ended("rest") == "done"
    reference = ran.reference("qwen3_deep dora")
    assert_same_state(ran.jobs, "broken", reference, at=STEPS, of=STEPS, tolerance=TOLERANCE)


@pytest.mark.timeout(200)
def test_merged_and_exported_weights_compute_what_the_adapter_does(ran: Ran, tmp_path: Path) -> None:
    plan = ran.plan("phi3 dora")
    assert plan.hf is not None
    assert plan.adapter is not None
    checkpoint = step_folder(ran.jobs.folder / ran.reference("phi3 dora") / "checkpoints", STEPS)
    merged = merged_weights(plan, ChosenWeights([checkpoint]), torch.float64)
    path = str(plan.weights.path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).double()
    plain.load_state_dict(merged)
    apart = HfDecoder(plan.hf, plan.model, wide=True, adapter=plan.adapter.form).double()
    materialise(apart, "cpu")
    fill(apart, plan.weights, seed=0)
    trained = {f"model.{n}": p.detach() for n, p in apart.named_parameters() if is_adapter(n)}
    load_folder(checkpoint, trained)
    tokens = torch.arange(LENGTH).view(1, LENGTH)
    with torch.no_grad(), KeepWide():
        expected, got = apart.logits(tokens), plain(tokens, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    state = trained_weights(plan, ChosenWeights([checkpoint]), torch.float64)
    write_adapter(state, plan.model, tmp_path, base=path, transformers=True)
    with open_adapter(tmp_path, plan.model, transformers=True) as folder:
        folder.check({n: tuple(t.shape) for n, t in state.items()})
        for name, value in state.items():
            shape = tuple(value.shape)
            assert torch.equal(folder.block(name, shape, (0,) * len(shape), shape), value)
