"""Ranks of test_atp.py: decoders in every two-dimensional layout against the same decoder in one process."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _expected_traffic import tensor_calls
from _plans import small_plan
from _ranks import in_group
from layouts import laid
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor import DTensor

from partool.layout.tensor import own_partition
from partool.plan.layout import Mesh
from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.spec.model import Weights
from partool.spec.training import LrSchedule, OptimizerSpec
from partool.work.training import TrainingWork
from partool_runtime.data.batches import MicroBatch
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.model import AnyDecoder
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel.comm import CommCounter
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.weights import build, fill, materialise

STEPS, SEQUENCES, LENGTH = 5, 2, 7
SHAPES = {"layers": 2, "hidden": 24, "ffn_hidden": 40, "vocab": 37, "heads": 16, "kv_heads": 8, "head_dim": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPES | {"qkv_bias": True, "qk_norm": True, "window": 3, "layer_types": ("full", "sliding")},
    "gpt": SHAPES
    | {
        "kv_heads": 16, "head_dim": 3, "norm": "layernorm", "position": "learned", "activation": "gelu",
        "max_position": 9, "qkv_bias": True, "out_bias": True, "ffn_bias": True, "tied_embeddings": True,
    },
    "sinks": SHAPES | {
        "sinks": True, "window": 3, "layer_types": ("full", "sliding"), "activation": "swiglu_clamped",
        "swiglu_limit": 0.04, "out_bias": True,
    },
}  # fmt: skip
"""Group queries, every kind of bias and norm, a vocabulary that divides by no number of ranks."""
OPTIMIZER = OptimizerSpec(lr=0.02, weight_decay=0.1, clip=0.4, schedule=LrSchedule(warmup_steps=3))

Named = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One layout and model."""

    inner: int
    model: str = "llama"
    layout: dict[str, Any] = field(default_factory=dict)
    data: int = 1
    """Data-parallel ranks."""
    stages: int = 1
    """Pipeline ranks, and micro-batches."""
    train: bool = False
    """Compare five steps as well as one pass."""
    frozen: tuple[str, ...] = ()

    def plan(self, world_size: int) -> Plan:
        """Return the plan of this case."""
        base = small_plan(Path(), ranks=1, zero=0, model=MODELS[self.model], training={"precision": "fp64"})
        mesh = Mesh(pp=self.stages, dp_shard=self.data, tp=world_size // self.data // self.stages)
        sizes = {"mesh": mesh, "tensor_inner": self.inner, "micro_batch": SEQUENCES // self.stages}
        more = {"accumulation": self.stages, "zero": 3 if self.data > 1 else 0}
        if self.stages > 1:
            more["stages"] = ((0, 1), (1, 2))
        layout = laid(base.layout, **(sizes | more | self.layout))
        training = {"sequence_length": LENGTH, "global_batch": SEQUENCES * self.data, "steps": STEPS}
        partition = own_partition(base.model, mesh.tp, self.inner)
        updates = {"layout": layout, "partition": partition, "optimizer": OPTIMIZER, "frozen": self.frozen}
        return base.model_copy(update=updates | {"training": base.training.model_copy(update=training)})


def cases(world_size: int) -> dict[str, Case]:
    """Return all factorisations of the tensor ranks, and each way to arrange and to combine them once."""
    inners = [inner for inner in (1, 2, 4, 8) if inner <= world_size]
    found = {f"{world_size // inner}x{inner} llama": Case(inner, train=True) for inner in inners}
    if world_size == 8:
        return found | {"2x4 gpt": Case(4, "gpt")}
    in_pieces = {"tensor_chunks": 3, "tensor_overlap": "backward"}
    for policy in ("full", "selective", "attention"):
        found[f"2x2 {policy}"] = Case(2, layout={"recompute": (policy, "none")})
    for model in MODELS:
        found[f"2x2 {model} in pieces"] = Case(2, model, layout=in_pieces)
    halved = in_pieces | {"schedule": "zb-h1", "recompute": ("full", "selective")}
    frozen = ("embed.*", "layers.0.*", "layers.1.attention.k.weight", "layers.1.ffn.down.*")
    return found | {
        "2x2 llama frozen": Case(2, frozen=frozen),
        "2x2 gpt": Case(2, "gpt", train=True),
        "1x4 gpt": Case(4, "gpt"),
        "1x2 gpt ZeRO-3": Case(2, "gpt", layout=in_pieces, data=2, train=True),
        "1x2 gpt 1f1b": Case(2, "gpt", stages=2),
        "1x2 llama zb-h1": Case(2, layout=halved, stages=2, train=True),
    }


def batch(step: int, replica: int, micro_batches: int = 1) -> list[MicroBatch]:
    """Return the micro-batches of a data-parallel rank; ignored labels make them count differently."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    tokens_BS = torch.randint(37, (SEQUENCES, LENGTH), generator=generator)
    labels_BS = tokens_BS.roll(-1, 1).index_fill(1, torch.tensor([LENGTH - 1 - replica]), -100)
    labels_BS[0, :3] = -100
    pairs = zip(tokens_BS.chunk(micro_batches), labels_BS.chunk(micro_batches), strict=True)
    return [MicroBatch(tokens, labels) for tokens, labels in pairs]


@dataclass(frozen=True)
class Reference:
    """Loss, gradients and training steps of one process."""

    loss: float
    gradients: Named
    norms: list[float]
    weights: Named


@functools.cache
def reference(name: str, replicas: int) -> Reference:
    """Train in this process on the batches of all data-parallel ranks, with torch's own optimizer and clipping."""
    model = build(small_plan(Path(), model=MODELS[name]).model)
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(), seed=4)
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [p for p in named.values() if (p.ndim >= 2) is decays],
            "weight_decay": OPTIMIZER.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False)
    norms: list[float] = []
    for step in range(-1, STEPS):
        micros = [micro for replica in range(replicas) for micro in batch(max(step, 0), replica)]
        optimizer.zero_grad()
        loss = torch.stack([model(micro.tokens_BS, micro.labels_BS) for micro in micros]).sum()
        if step >= 0:
            loss = loss / sum(int((micro.labels_BS != -100).sum()) for micro in micros)
        loss.backward()
        if step < 0:
            first = float(loss.detach()), {name: p.grad.clone() for name, p in named.items()}
            continue
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), math.inf)))
        torch._foreach_mul_([p.grad for p in named.values()], min(1.0, OPTIMIZER.clip / norms[-1]))
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * lr_factor(OPTIMIZER.schedule, step, STEPS)
        optimizer.step()
    return Reference(*first, norms, {name: p.detach() for name, p in named.items()})


def assert_close(actual: Any, expected: Any, limit: float, why: object) -> None:
    """Fail if two tensors or numbers are further apart than the limit, relative to the larger of 1 and the expected."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    assert a.shape == b.shape, (why, a.shape, b.shape)
    if a.numel():
        gap = float((a - b).abs().max())
        assert gap <= limit * max(1.0, float(b.abs().max())), (why, gap)


def assert_parts(model: AnyDecoder, actual: Named, expected: Named, limit: float, why: str) -> None:
    """Compare this rank's parts of tensors with those of the whole."""
    for name, part in actual.items():
        mine = expected[name]
        for dim, ranges in enumerate(model.placements[name].spans):
            mine = torch.cat([mine.narrow(dim, a, b - a) for a, b in ranges] or [mine.narrow(dim, 0, 0)], dim)
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        assert_close(whole.detach(), mine, limit, (why, name))


def no_timer(term: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def check(name: str, case: Case) -> None:
    """Compare one layout with one process."""
    plan = case.plan(dist.get_world_size())
    ranks = build_ranks(plan, torch.device("cpu"))
    prepared = prepare(plan, ranks, lambda done, sent_bytes: None)
    fill(prepared.model, Weights(), seed=4)
    expected = reference(case.model, case.data)
    parameters = trained_parameters(prepared.model)
    # Nothing is compiled while somebody counts.
    with CommCounter() if case.layout.get("compile") is None else contextlib.nullcontext() as counter:
        loss = prepared.passes.step(
            batch(0, ranks.dp.place, case.stages), torch.ones((), dtype=torch.float64), no_timer
        )
    dist.all_reduce(loss)
    assert_close(loss / ranks.tp.size, expected.loss, 1e-12, name)
    gradients = {key: p.grad for key, p in parameters.items() if p.grad is not None}
    assert gradients.keys() == parameters.keys(), name
    assert_parts(prepared.model, gradients, expected.gradients, 1e-12, name)
    if case.data == case.stages == 1 and not case.frozen and case.layout.get("compile") is None:
        assert counter is not None
        check_traffic(name, plan, ranks, counter)
    if case.train:
        check_steps(name, prepared, plan, ranks, expected)
    prepared.passes.close()


def check_traffic(name: str, plan: Plan, ranks: Ranks, counter: CommCounter) -> None:
    """Compare counted calls and bytes with the planner's."""
    job = TrainingWork(plan.model, plan.devices, LENGTH, "fp64", global_batch=SEQUENCES)
    planned: dict[str, list[int]] = {}
    for call in tensor_calls(job, plan.layout, (0,), ranks.tp.place):
        of_kind = planned.setdefault(call.kind, [0, 0, 0])
        for at, number in enumerate((1, call.payload_bytes, call.sent_bytes // call.times)):
            of_kind[at] += call.times * number
    counted = {kind: [t.calls, t.payload_bytes, t.sent_bytes] for kind, t in counter.snapshot().items()}
    assert counted == planned, (name, counted, planned)


def check_steps(name: str, prepared: Prepared, plan: Plan, ranks: Ranks, expected: Reference) -> None:
    """Compare norms and weights of five steps."""
    model = prepared.model
    parameters = trained_parameters(model)
    optimizer = DeviceOptimizer(parameters, OPTIMIZER, model.copies)
    stepper = Stepper(
        prepared.passes, optimizer, LossScaler(False), ranks=ranks, training=plan.training, spec=OPTIMIZER
    )
    for step in range(STEPS):
        result = stepper.step(step, batch(step, ranks.dp.place, ranks.pp.size), no_timer)
        assert_close(result.grad_norm, expected.norms[step], 1e-10, (name, step))
    assert_parts(model, dict(parameters), expected.weights, 1e-10, name)


def check_compiled() -> None:
    """Compare compiled layers, without their C++: all layers of a kind are one graph, with all that they exchange."""
    compiled = torch.compile
    for name, fields in MODELS.items():
        graphs: list[Any] = []
        torch._dynamo.reset()

        def backend(graph: Any, examples: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return aot_eager(graph, examples)

        torch.compile = functools.partial(compiled, backend=backend, fullgraph=True)
        for layout in ({}, {"tensor_chunks": 3, "tensor_overlap": "backward"}):
            check(f"{name} compiled", Case(2, name, layout=layout | {"compile": "block"}))
        kinds = len(set(fields.get("layer_types", ("full",))))
        assert len(graphs) == 2 * kinds, (name, len(graphs))


def check_case(name: str) -> None:
    """Compare one layout of the world's ranks with one process."""
    with in_group():
        check(name, cases(dist.get_world_size())[name])


def check_compiled_layers() -> None:
    """Compare compiled layers with one process."""
    with in_group():
        check_compiled()
