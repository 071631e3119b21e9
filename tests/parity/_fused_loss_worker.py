"""Ranks of test_fused_loss.py: the loss by kernels, and with a z-loss, in every arrangement against one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _atp_worker import LENGTH, MODELS, Named, assert_close, assert_parts, no_timer
from _plans import small_plan
from _ranks import in_group
from layouts import laid

from partool.layout.tensor import own_partition
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.model import Weights
from partool_runtime.data.batches import MicroBatch
from partool_runtime.mesh import build_ranks
from partool_runtime.parallel.comm import CommCounter
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.preparation import prepare
from partool_runtime.weights import build, fill, materialise

RANKS, SEQUENCES, Z_LOSS = 4, 4, 0.03
NARROW = MODELS["gpt"] | {"vocab": 5}
"""A vocabulary of 5 tokens over 4 ranks: the last rank holds none."""
ALL = MODELS | {"narrow": NARROW, "tall": MODELS["llama"] | {"layers": 4, "layer_types": (), "window": None}}


@dataclass(frozen=True)
class Case:
    """One layout and model; all four ranks are its data-parallel, tensor or pipeline ranks."""

    tp: int = 1
    pp: int = 1
    model: str = "llama"
    layout: dict[str, Any] = field(default_factory=dict)
    z_loss: float = Z_LOSS
    fused: bool = True

    def plan(self) -> Plan:
        """Return the plan of this case."""
        data = RANKS // self.tp // self.pp
        base = small_plan(Path(), ranks=1, zero=0, model=ALL[self.model], training={"precision": "fp64"})
        in_step = SEQUENCES if self.pp > 1 else 1
        layers, inner = base.model.layers, self.layout.get("tensor_inner", 1)
        chunks = self.layout.get("chunks", 1)
        cuts = [layers * stage // (self.pp * chunks) for stage in range(self.pp * chunks + 1)]
        layout = laid(
            base.layout,
            mesh=Mesh(pp=self.pp, dp_shard=data, tp=self.tp),
            micro_batch=SEQUENCES // in_step,
            accumulation=in_step,
            zero=3 if data > 1 and self.pp == 1 else 0,
            recompute=("none",) * layers,
            stages=tuple(pairwise(cuts)),
            fused=("loss",) if self.fused else (),
            **self.layout,
        )
        training = {"sequence_length": LENGTH, "global_batch": SEQUENCES * data, "steps": 1, "z_loss": self.z_loss}
        partition = own_partition(base.model, self.tp, inner, sequence_norms=layout.tensor.sequence_norms)
        updates = {"layout": layout, "partition": partition}
        return base.model_copy(update=updates | {"training": base.training.model_copy(update=training)})


ZERO_BUBBLE = {"schedule": "zb-h1"}
CASES = {
    "ZeRO-3": Case(),
    "ZeRO-3 tied, tiles": Case(model="gpt", layout={"loss_tile_tokens": 3}),
    "tp 4": Case(4),
    "tp 4, a rank without tokens": Case(4, model="narrow", layout={"loss_tile_tokens": 3}),
    "tp 4 shares of the sequence": Case(
        4, layout={"sequence_norms": True, "tensor_overlap": "backward", "loss_tile_tokens": 5}
    ),
    "tp 2x2": Case(4, model="gpt", layout={"tensor_inner": 2, "loss_tile_tokens": 9}),
    "tp 2 with 2 stages": Case(2, 2, "gpt", layout={"schedule": "gpipe"}),
    "tp 2 with 2 stages, halved": Case(2, 2, layout=ZERO_BUBBLE),
    "tp 2 with 2 stages, halved, tiles": Case(2, 2, layout=ZERO_BUBBLE | {"loss_tile_tokens": 3}),
    "2 stages, halved": Case(1, 2, layout=ZERO_BUBBLE),
    "2 stages, tiles": Case(1, 2, "gpt", layout={"loss_tile_tokens": 3}),
    "2 stages, all forward first, tiles": Case(1, 2, layout={"schedule": "gpipe", "loss_tile_tokens": 3}),
    "tp 2 with 2 stages, early": Case(2, 2, "gpt", layout={"loss_tile_tokens": 3}),
    "weipipe": Case(1, 4, "tall", layout={"schedule": "weipipe"}),
    "plain, tp 4": Case(4, fused=False, layout={"loss_tile_tokens": 3}),
    "plain, ZeRO-3": Case(fused=False),
    "plain, 2 stages, tiles": Case(1, 2, "gpt", layout={"loss_tile_tokens": 3}, fused=False),
    "no z-loss": Case(4, z_loss=0.0),
}


def batch(vocabulary: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of a data-parallel rank; ignored labels make them count differently."""
    generator = torch.Generator().manual_seed(replica)
    tokens_BS = torch.randint(vocabulary, (SEQUENCES, LENGTH), generator=generator)
    labels_BS = tokens_BS.roll(-1, 1).index_fill(1, torch.tensor([LENGTH - 1 - replica]), -100)
    labels_BS[0, :3] = -100
    return tokens_BS, labels_BS


@functools.cache
def reference(name: str, replicas: int, z_loss: float) -> tuple[float, Named, float]:
    """Return loss, gradients, and the loss of one replica, from all logits and the formula."""
    model = build(small_plan(Path(), model=ALL[name]).model)
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(), seed=4)
    losses = []
    for replica in range(replicas):
        tokens_BS, labels_BS = batch(model.config.vocab, replica)
        logits_BSV = model.logits(tokens_BS)
        log_totals_BS = logits_BSV.logsumexp(-1)
        targets_BS = logits_BSV.gather(-1, labels_BS.clamp_min(0)[..., None])[..., 0]
        of_tokens_BS = log_totals_BS - targets_BS + z_loss * log_totals_BS**2
        losses.append(of_tokens_BS[labels_BS != -100].sum())
    total = torch.stack(losses).sum()
    total.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    return float(total.detach()), gradients, float(losses[0].detach())


def check(name: str, case: Case) -> None:
    """Compare one layout with one process: a training pass, and an evaluation."""
    plan = case.plan()
    ranks = build_ranks(plan, torch.device("cpu"))
    prepared = prepare(plan, ranks, lambda done, sent_bytes: None)
    fill(prepared.model, Weights(), seed=4)
    replicas = RANKS // case.tp // case.pp
    expected, of_parameters, _ = reference(case.model, replicas, case.z_loss)
    tokens_BS, labels_BS = batch(plan.model.vocab, ranks.dp.place)
    count = plan.layout.derived.accumulation
    micros = [MicroBatch(*pair) for pair in zip(tokens_BS.chunk(count), labels_BS.chunk(count), strict=True)]
    with CommCounter() as counter:
        loss = prepared.passes.step(micros, torch.ones((), dtype=torch.float64), no_timer)
    dist.all_reduce(loss)
    assert_close(loss / case.tp, expected, 1e-12, name)
    parameters = trained_parameters(prepared.model)
    gradients = {key: p.grad for key, p in parameters.items() if p.grad is not None}
    if case.pp == 1:
        assert gradients.keys() == of_parameters.keys(), name
    if case.tp > 1:
        assert_parts(prepared.model, gradients, of_parameters, 1e-12, name)
    else:
        for key, found in gradients.items():
            whole = found.full_tensor() if hasattr(found, "full_tensor") else found
            assert_close(whole, of_parameters[key], 1e-12, (name, key))
    evaluated = prepared.passes.evaluate(micros, lambda: False)
    assert evaluated is not None
    dist.all_reduce(evaluated)
    assert_close(evaluated / case.tp, expected, 1e-12, (name, "evaluation"))
    prepared.passes.close()
    if name.startswith("tp 4"):
        tile = plan.layout.tiles.loss or SEQUENCES * LENGTH
        assert counter.snapshot()["all_reduce"].calls >= 2 * -(-SEQUENCES * LENGTH // tile), name


def check_case(name: str) -> None:
    """Compare one arrangement with the formula."""
    with in_group():
        check(name, CASES[name])
