"""One rank: bytes of the training state that it holds for experts and for all else, counted in a step."""

from __future__ import annotations

import torch
from _ranks import in_group
from torch import nn

from partool.plan.types import Plan
from partool_runtime.mesh import build_ranks
from partool_runtime.model.moe import Experts
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.preparation import prepare
from partool_runtime.torch_internals.fsdp import gathered_bytes, gradient_bytes
from partool_runtime.torch_internals.tensors import local_bytes
from partool_runtime.weights import fill, post_load


def held_bytes(plan_json: str) -> dict[str, tuple[int, int]]:
    """Return bytes of experts and of all else, by what they are for.

    ``parameters`` and ``moments`` are those between steps; ``gradients`` and ``gathered`` those between two
    micro-batches of a step.
    """
    plan = Plan.model_validate_json(plan_json)
    with in_group():
        ranks = build_ranks(plan, torch.device("cpu"))
        prepared = prepare(plan, ranks, lambda done, sent_bytes: None)
        model, sync = prepared.model, prepared.sync
        assert isinstance(model, nn.Module)
        assert sync is not None
        fill(model, plan.weights, seed=0)
        post_load(model)
        optimizer = DeviceOptimizer(trained_parameters(model), plan.optimizer, model.copies)
        found = {
            "parameters": _split(dict(model.named_parameters())),
            "moments": _split(optimizer.state()),
        }
        assert prepared.loads is not None
        prepared.loads.begin(1.0, 1)
        sync.before_micro_batch(last=False)
        tokens_BS = torch.arange(2 * plan.training.sequence_length).reshape(2, -1) % plan.model.vocab
        model(tokens_BS, tokens_BS).backward()
        sync.after_micro_batch()
        for title, count in (("gradients", gradient_bytes), ("gathered", gathered_bytes)):
            of_experts = sum(count(module) for module in model.modules() if isinstance(module, Experts))
            found[title] = of_experts, sum(map(count, model.roots())) - of_experts
        prepared.passes.close()
    return found


def _split(tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    of_experts = local_bytes(tensor for name, tensor in tensors.items() if ".moe.experts." in name)
    return of_experts, local_bytes(tensors.values()) - of_experts
