"""Adapters in float64: a plain model with summed matrices is the reference, and every layout follows one process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from _adapter_worker import UNCHANGED, noise, train_adapter
from _bases import NF4, WIDE, numbers
from _by_torch import ByTorch
from _expected_traffic import tensor_calls
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import FIVE, HALVES, LATENT, ONE, QUARTERS, SHARED, TIED, tensor_plan
from often import often
from test_experts import SHORT, SINKS
from test_tensor_trainer import assert_same_state
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

from partool.cost.time.pipeline import stages_of_ranks
from partool.layout.adapters import frozen_beside, is_adapter
from partool.layout.parameters import parameters
from partool.plan.layout import Mesh
from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.adapter import AdapterSpec
from partool.spec.model import Weights
from partool.spec.training import CheckpointSpec, OptimizerGroup
from partool.work.training import TrainingWork
from partool_runtime.checkpoint import load_folder, step_folder, tensor_shapes
from partool_runtime.data import open_data
from partool_runtime.errors import ConfigurationError
from partool_runtime.merge import merged_weights
from partool_runtime.model import Decoder
from partool_runtime.optim.groups import grouped
from partool_runtime.weights import fill_from
from partool_runtime.weights.chosen import ChosenWeights
from partool_runtime.weights.draw import init_source

STEPS, STOP = 10, 5
TOLERANCE = 1e-8
"""Ten steps of AdamW multiply rounding by up to 1e6; a missing term of a gradient is seen in the third digit."""
OF_DROPOUT = 1e-6
"""Dropout makes gradients noisier, and rounding grows faster; another mask is seen in the first digit."""
EXPERTS = SHORT | {"moe": SHORT["moe"] | {"aux_loss": 0.0, "z_loss": 0.0}}
"""Without losses of routers, which are no part of the decoder's loss."""
MODELS: dict[str, dict[str, Any]] = {
    "five": FIVE, "tied": TIED, "shared": SHARED, "latent": LATENT, "experts": EXPERTS, "lamb": SHARED, "nf4": WIDE
}  # fmt: skip
ADAPTERS: dict[str, AdapterSpec] = {
    "five": AdapterSpec(rank=3, alpha=5.0, train=["head", "norms"], lr_ratio=4.0),
    "tied": AdapterSpec(rank=2, alpha=3.0, rslora=True, targets=("q", "v_proj", "layers.[12].ffn.*")),
    "shared": AdapterSpec(rank=3, alpha=5.0),
    "latent": AdapterSpec(rank=3, alpha=5.0, train=["layers.1.ffn.up.*"]),
    "experts": AdapterSpec(rank=3, alpha=5.0),
    "lamb": AdapterSpec(rank=2, alpha=3.0),
    "nf4": NF4,
}
MODELS |= {"sinks": SINKS | {"moe": SINKS["moe"] | {"aux_loss": 0.0}}}
ADAPTERS |= {"sinks": AdapterSpec(rank=3, alpha=5.0, train=["*.sinks", "*.logit_bias", "*.bias"])}
OPTIMIZERS = ("sgd", "lion", "adagrad")
MODELS |= dict.fromkeys(OPTIMIZERS, SHARED)
ADAPTERS |= {name: AdapterSpec(rank=2, alpha=4.0 + n, lr_ratio=3.0) for n, name in enumerate(OPTIMIZERS)}
MODELS |= {f"{name} dropout": MODELS[name] for name in ("five", "latent")}
ADAPTERS |= {
    "five dropout": ADAPTERS["five"].model_copy(update={"dropout": 0.3}),
    "latent dropout": AdapterSpec(kind="dora", rank=3, alpha=5.0, dropout=0.3, train=["norms"]),
}
MODELS |= {f"{name} dora": MODELS[name] for name in ("five", "tied", "shared", "latent")}
ADAPTERS |= {
    f"{name} dora": ADAPTERS[name].model_copy(update={"kind": "dora"}) for name in ("five", "tied", "shared", "latent")
}
HOST = {"offload_optimizer": "cpu", "gradients": "fp32", "bucket_mib": 2**-3, "undo_gib": 2**-10, "speculate": True}
CORE = (
    "zb-v tensor",
    "dora three tensor ranks",
    "nf4 zero-3 tensor shares",
)
"""Cases that run every time; the others are long."""


def adapter_plan(text: Path, mesh: Mesh, zero: int, name: str = "five", every: int = 0, **layout: Any) -> Plan:
    """Return a plan of ten steps, which saves its state at the end."""
    adapter = ADAPTERS[name]
    model = MODELS[name] | {"adapter": adapter.form}
    plan = tensor_plan(text, mesh, model=model, settings={"zero": zero, "steps": STEPS}, **layout)
    # Adagrad's first steps are as long as its learning rate; long ones make rounding grow tenfold with each step.
    lr = 3.0e-4 if name == "adagrad" else plan.optimizer.lr
    kind = name if name in (*OPTIMIZERS, "lamb") else "adamw"
    optimizer = plan.optimizer.model_copy(update={"name": kind, "lr": lr})
    if adapter.lr_ratio != 1.0:
        groups = {"*.lora_b": OptimizerGroup(lr_factor=adapter.lr_ratio)}
        optimizer = optimizer.model_copy(update={"groups": groups})
    frozen = frozen_beside([info.name for info in parameters(plan.model)], adapter.train)
    update = {"adapter": adapter, "frozen": frozen, "optimizer": optimizer}
    return plan.model_copy(update=update | {"checkpoint": CheckpointSpec(every=every, keep=STEPS)})


@cache
def cases(text: Path) -> dict[str, tuple[Plan, str]]:
    """Return plans by name, each with the model of the run of one process that it must equal."""
    make = partial(adapter_plan, text)
    two, piped = Mesh(tp=2, dp_shard=2), Mesh(tp=2, pp=2)
    norms, ring = {"sequence_norms": True}, {"sequence_method": "ring", "sequence_order": "zigzag"}
    chosen = {
        f"zero-{zero}": make(Mesh(dp_replicate=2) if zero == 0 else Mesh(dp_shard=2), zero, name)
        for zero, name in enumerate(("five", "tied", "latent", "shared"))
    }
    for zero, name in enumerate(("shared", "tied", "latent", "five")):
        mesh = Mesh(tp=2, dp_replicate=2) if zero == 0 else two
        chosen[f"zero-{zero} tensor"] = make(mesh, zero, name)
        chosen[f"zero-{zero} tensor shares"] = make(mesh, zero, name, **norms)
    chosen |= {
        "three tensor ranks": make(Mesh(tp=3), 0, "shared", **norms),
        "overlapped": make(two, 1, "five", tensor_overlap="backward", **norms),
        "chunks": make(two, 1, "five", tensor_chunks=3),
        "hybrid zero-3": make(Mesh(dp_replicate=2, dp_shard=2), 3, "five"),
        "compiled": make(Mesh(dp_shard=2), 3, "five", compile="block"),
        **{
            f"{policy} zero-3": make(two, 3, "shared", recompute=policy, **norms)
            for policy in ("selective", "attention", "full", "keep_attention")
        },
        "tiles": make(Mesh(dp_shard=2), 2, "five", mlp_tile_tokens=4, loss_tile_tokens=7, recompute="full"),
        "1f1b": make(Mesh(pp=2, dp_shard=2), 2, "tied", stages=HALVES, schedule="1f1b"),
        "zb-h1 tensor": make(piped, 0, "five", stages=HALVES, schedule="zb-h1"),
        "zb-v tensor": make(piped, 0, "five", stages=QUARTERS, schedule="zb-v", **norms),
        "zb-v tied": make(Mesh(pp=2), 0, "tied", stages=QUARTERS, schedule="zb-v"),
        "hanayo": make(piped, 0, "five", stages=QUARTERS, schedule="hanayo"),
        "optimizer on the host": make(Mesh(dp_shard=2), 1, "tied", **HOST),
        "parameters on the host": make(Mesh(dp_shard=2), 3, "five", **HOST, offload_parameters="cpu"),
        "lamb tensor": make(two, 1, "lamb", **norms),
        "sgd zero-3": make(Mesh(dp_shard=2), 3, "sgd"),
        "lion zero-1": make(Mesh(dp_shard=2), 1, "lion"),
        "adagrad interleaved": make(Mesh(pp=2), 0, "adagrad", stages=QUARTERS, schedule="interleaved"),
        "ring": make(Mesh(dp_shard=2, cp=2), 1, "five", **ring),
        "ulysses": make(Mesh(dp_shard=2, cp=2), 3, "five", sequence_method="ulysses"),
        "ulysses tensor": make(Mesh(tp=2, cp=2), 1, "shared", sequence_method="ulysses"),
        "experts zero-3": make(Mesh(dp_shard=4), 3, "experts", expert=2),
        "experts zero-1": make(Mesh(dp_shard=4), 1, "experts", expert=2),
        "experts uncut": make(two, 1, "experts"),
        "experts on tensor ranks": make(two, 1, "experts", expert=2),
        "sinks uncut": make(two, 1, "sinks"),
        "sinks on expert ranks": make(two, 3, "sinks", expert=2),
        "nf4 zero-3 tensor shares": make(two, 3, "nf4", **norms),
    }
    chosen |= dora_cases(make) | dropout_cases(make)
    models = {plan.model: name for name, plan in ((name, make(ONE, 0, name)) for name in MODELS)}
    return {name: (plan, models[plan.model]) for name, plan in chosen.items()}


def dora_cases(make: Callable[..., Plan]) -> dict[str, Plan]:
    """Return plans of DoRA, whose norms are those of gathered rows, of a rank's rows, or sums over tensor ranks."""
    two, norms, ring = Mesh(tp=2, dp_shard=2), {"sequence_norms": True}, {"sequence_method": "ring"}
    piped = Mesh(tp=2, pp=2)
    plans = {
        "zero-0": make(Mesh(dp_replicate=2), 0, "five dora"),
        "zero-1": make(Mesh(dp_shard=2), 1, "tied dora"),
        "zero-2 tiles": make(Mesh(dp_shard=2), 2, "five dora", mlp_tile_tokens=4, recompute="full"),
        "zero-3": make(Mesh(dp_shard=2), 3, "latent dora"),
        "zero-1 tensor": make(two, 1, "five dora"),
        "zero-3 tensor shares": make(two, 3, "five dora", **norms),
        "zero-3 tensor latent": make(two, 3, "latent dora"),
        "three tensor ranks": make(Mesh(tp=3), 0, "shared dora", **norms),
        "compiled": make(Mesh(tp=2), 0, "five dora", compile="block"),
        "compiled zero-3": make(Mesh(dp_shard=2), 3, "five dora", compile="block"),
        **{
            f"{policy} zero-3": make(two, 3, "shared dora", recompute=policy, **norms)
            for policy in ("selective", "full", "keep_attention")
        },
        "1f1b": make(Mesh(pp=2, dp_shard=2), 2, "tied dora", stages=HALVES, schedule="1f1b"),
        "zb-h1 tensor": make(piped, 0, "five dora", stages=HALVES, schedule="zb-h1"),
        "zb-v tensor": make(piped, 0, "five dora", stages=QUARTERS, schedule="zb-v", **norms),
        "ring": make(Mesh(dp_shard=2, cp=2), 1, "five dora", **ring, sequence_order="zigzag"),
        "ulysses": make(Mesh(dp_shard=2, cp=2), 3, "five dora", sequence_method="ulysses"),
        "parameters on the host": make(Mesh(dp_shard=2), 3, "five dora", **HOST, offload_parameters="cpu"),
    }
    return {f"dora {name}": plan for name, plan in plans.items()}


def dropout_cases(make: Callable[..., Plan]) -> dict[str, Plan]:
    """Return plans with dropout, whose masks each layout has to repeat."""
    two, norms, ring = Mesh(tp=2, dp_shard=2), {"sequence_norms": True}, {"sequence_method": "ring"}
    piped = Mesh(tp=2, pp=2)
    plans = {
        "zero-3": make(Mesh(dp_shard=2), 3, "five dropout"),
        "tensor": make(two, 1, "five dropout"),
        "latent tensor shares": make(two, 3, "latent dropout", **norms),
        "three tensor ranks": make(Mesh(tp=3), 0, "five dropout", **norms),
        "tiles": make(Mesh(dp_shard=2), 2, "five dropout", mlp_tile_tokens=4, recompute="full"),
        "tiles tensor": make(Mesh(tp=2), 0, "five dropout", mlp_tile_tokens=4),
        "full zero-3": make(two, 3, "five dropout", recompute="full"),
        "selective zero-3": make(two, 3, "latent dropout", recompute="selective"),
        "compiled": make(Mesh(tp=2), 0, "five dropout", compile="block"),
        "compiled full": make(Mesh(dp_shard=2), 3, "five dropout", compile="block", recompute="full"),
        "1f1b full": make(Mesh(pp=2, dp_shard=2), 2, "five dropout", stages=HALVES, schedule="1f1b", recompute="full"),
        "zb-v tensor": make(piped, 0, "five dropout", stages=QUARTERS, schedule="zb-v", **norms),
        "ring": make(Mesh(dp_shard=2, cp=2), 1, "five dropout", **ring, sequence_order="zigzag"),
        "ulysses": make(Mesh(dp_shard=2, cp=2), 3, "latent dropout", sequence_method="ulysses"),
    }
    return {f"dropout {name}": plan for name, plan in plans.items()}


class Ran:
    """Runs of cases and references, each made when it is first asked for."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.text = jobs.folder / "text"
        write_text(self.text)
        self._done: set[str] = set()

    def run(self, name: str, plan: Plan) -> str:
        """Return the folder of the run of a plan."""
        if name not in self._done:
            self._done.add(name)
            self.jobs.train(name, plan, run=name)
        assert self.jobs.ended(name) == "done"
        return name

    def reference(self, model: str) -> str:
        """Return the folder of the run of one process."""
        return self.run(f"reference {model}", adapter_plan(self.text, ONE, 0, model))


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(Jobs(tmp_path_factory.mktemp("adapters"), pools, train_adapter))


def summed(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor | None, adapter: AdapterSpec, matrices: int
) -> torch.Tensor:
    """Return the matrix with the adapter's product; stacked matrices have adapters of their own."""
    root = math.sqrt(adapter.rank) if adapter.rslora else adapter.rank
    products = [low_b @ low_a for low_a, low_b in zip(a.chunk(matrices), b.chunk(matrices), strict=True)]
    both = weight + adapter.alpha / root * torch.cat(products)
    return both if m is None else m[:, None] * both / both.norm(dim=1, keepdim=True).detach()


Change = Callable[[str, torch.Tensor], torch.Tensor]


def by_torch(
    plan: Plan, adapter: AdapterSpec, changed: Change = lambda name, matrix: matrix
) -> dict[str, torch.Tensor]:
    """Train in this process: a decoder without adapters, whose matrices are sums, and torch's own optimizer.

    ``changed`` returns what the base has in the place of a parameter.
    """
    torch.set_num_threads(1)  # several threads wait for each other where ranks of other tests run
    plain = plan.model.model_copy(update={"adapter": None})
    decoder, shapes = Decoder(plain).double(), {info.name: info.shape for info in parameters(plan.model)}
    fill_from(decoder, init_source(plain, plan.training.seed))
    drawn = noise(plan.training.seed)
    added = {n: drawn(n, s, (0, 0), s).double() for n, s in shapes.items() if is_adapter(n)}
    first = dict(decoder.named_parameters())
    for name in [name for name in added if name.endswith(".magnitude")]:
        added[name] = first[name.replace("magnitude", "weight")].detach().norm(dim=1)
    weights = {n: torch.nn.Parameter(changed(n, p.detach())) for n, p in first.items()} | {
        n: torch.nn.Parameter(t) for n, t in added.items()
    }
    patterns = frozen_beside(list(shapes), adapter.train)
    trained = {n: p for n, p in weights.items() if not any(torch_matches(n, each) for each in patterns)}
    spec = plan.optimizer
    groups = grouped(spec.model_copy(update={"groups": {}}), {name: p.ndim for name, p in trained.items()})
    optimizers = {name: ByTorch(spec.name, p, groups.groups[groups.of[name]]) for name, p in trained.items()}
    data = open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None)
    for step in range(STEPS):
        batch = data.step(step)
        labels = sum(int((micro.labels_BS != -100).sum()) for micro in batch)
        for micro in batch:
            values = dict(weights)
            for name in [each.removesuffix(".lora_a") for each in added if each.endswith("lora_a")]:
                matrices = plan.model.moe.experts if ".experts." in name and plan.model.moe else 1
                parts = (weights[f"{name}.lora_a"], weights[f"{name}.lora_b"], weights.get(f"{name}.magnitude"))
                values[f"{name}.weight"] = summed(weights[f"{name}.weight"], *parts, adapter, matrices)
            of_model = {name: value for name, value in values.items() if not is_adapter(name)}
            (functional_call(decoder, of_model, (micro.tokens_BS, micro.labels_BS)) / labels).backward()
        norm = clip_grad_norm_(list(trained.values()), math.inf)  # torch adds 1e-6 to the norm that it clips
        torch._foreach_mul_([p.grad for p in trained.values()], min(1.0, spec.clip / float(norm)))
        lr = spec.lr * lr_factor(spec.schedule, step, STEPS)
        for name, parameter in trained.items():
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            optimizers[name].step(lr * adapter.lr_ratio ** name.endswith("lora_b"), gradient)
            parameter.grad = None
    return {name: parameter.detach() for name, parameter in trained.items()}


def torch_matches(name: str, pattern: str) -> bool:
    """Return whether a name is one of a pattern, in which ``*`` stands for a layer."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in (p, "*") for p, w in zip(parts, wanted, strict=True))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "model",
    often(
        [name for name in MODELS if name != "lamb" and "dropout" not in name],
        ["five", "nf4", "adagrad"],
    ),
)
def test_one_process_follows_summed_matrices(ran: Ran, model: str) -> None:
    plan = adapter_plan(ran.text, ONE, 0, model)
    state = ran.jobs.state(ran.reference(model), STEPS)
    expected = by_torch(plan, ADAPTERS[model], partial(numbers, plan, ADAPTERS[model]))
    assert {key.removeprefix("model.") for key in state if key.startswith("model.")} == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[f"model.{name}"], value, rtol=TOLERANCE, atol=TOLERANCE, msg=partial("{}: {}".format, name)
        )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", often(cases(Path("text")), CORE))
def test_training_equals_one_process(ran: Ran, name: str) -> None:
    plan, model = cases(ran.text)[name]
    run = ran.run(name, plan)
    tolerance = OF_DROPOUT if ADAPTERS[model].dropout else TOLERANCE
    assert_same_state(ran.jobs, run, ran.reference(model), at=STEPS, of=STEPS, tolerance=tolerance)
    for rank in range(plan.layout.mesh.world_size):
        unchanged = json.loads((ran.jobs.folder / run / UNCHANGED.format(rank)).read_text())
        assert [each for each, same in unchanged.items() if not same] == []
        assert any(each.endswith(".weight") for each in unchanged)


MEASURED = ("three tensor ranks", "full zero-3", "zb-v tensor")


def traffic(ran: Ran, name: str, rank: int) -> tuple[int, int]:
    """Return the bytes that a rank sent to tensor ranks in a step, and those of the cost model."""
    plan, _ = cases(ran.text)[name]
    run, training, mesh = ran.run(name, plan), plan.training, plan.layout.mesh
    job = TrainingWork(
        plan.model, plan.devices, training.sequence_length, training.precision, global_batch=training.global_batch,
        frozen=plan.frozen,
    )  # fmt: skip
    summary = next(event for event in ran.jobs.events(run, "summary", rank) if event["scope"] == "rank")
    stages, shard = stages_of_ranks(plan.layout)[rank // (mesh.dp * mesh.tp)], rank // mesh.tp % mesh.dp_shard
    calls = tensor_calls(job, plan.layout, stages, rank % mesh.tp, shard)
    return summary["measures"]["traffic"]["tensor"]["value"], sum(call.sent_bytes for call in calls)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", MEASURED)
def test_bytes_of_norms_are_those_of_the_cost_model(ran: Ran, name: str) -> None:
    """DoRA's norms, and its magnitudes' gradients, come on top of what LoRA sends."""
    for rank in range(cases(ran.text)[name][0].layout.mesh.world_size):
        (sent, expected), (plain_sent, plain_expected) = (traffic(ran, f"{kind}{name}", rank) for kind in ("dora ", ""))
        assert sent - plain_sent == expected - plain_expected > 0, rank


@pytest.mark.timeout(200)
def test_a_stopped_run_goes_on_in_another_layout(ran: Ran) -> None:
    """The adapter comes from the checkpoint, the frozen weights from the seed; other frozen weights are refused."""
    sharded, cut = (adapter_plan(ran.text, *layout, "five dora") for layout in ((Mesh(dp_shard=2), 3), (Mesh(tp=2), 0)))
    ran.jobs.train("stopped", sharded, run="broken", stop_at=STOP)
    assert ran.jobs.ended("stopped", rank=1) == f"Preempted: stopped by SIGTERM after step {STOP}"
    # A run that ends with an error keeps its folder until its process ends.
    copytree(ran.jobs.folder / "broken" / "checkpoints", ran.jobs.folder / "other" / "checkpoints")
    ran.jobs.train("other", cut.model_copy(update={"weights": Weights(source="dummy")}), run="other", resume=True)
    assert "trained beside other frozen weights" in ran.jobs.ended("other")
    ran.jobs.train("rest", cut, run="broken", resume=True)
    assert ran.jobs.ended("rest") == "done"
    assert_same_state(ran.jobs, "broken", ran.reference("five dora"), at=STEPS, of=STEPS, tolerance=TOLERANCE)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", often([name for name in MODELS if name != "nf4"], ["five", "shared dora"]))
def test_merged_weights_compute_what_the_adapter_does(ran: Ran, model: str) -> None:
    plan = adapter_plan(ran.text, ONE, 0, model)
    checkpoint = step_folder(ran.jobs.folder / ran.reference(model) / "checkpoints", STEPS)
    apart, plain = (Decoder(each).double() for each in (plan.model, plan.model.model_copy(update={"adapter": None})))
    plain.load_state_dict(merged_weights(plan, ChosenWeights([checkpoint]), torch.float64))
    fill_from(apart, init_source(plan.model, plan.training.seed))
    tokens, kept = torch.arange(14).view(2, 7), tensor_shapes(checkpoint)
    with torch.no_grad():
        before = apart.logits(tokens)
        trained = {f"model.{n}": p.detach() for n, p in apart.named_parameters() if f"model.{n}" in kept}
        load_folder(checkpoint, trained)
        expected, got = apart.logits(tokens), plain.logits(tokens)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert float((got - before).abs().max()) > 1e-3
    with pytest.raises(ConfigurationError, match="other weights") as error:
        merged_weights(
            plan.model_copy(update={"weights": Weights(source="dummy")}), ChosenWeights([checkpoint]), torch.float64
        )
    assert error.value.code == "PT618"
