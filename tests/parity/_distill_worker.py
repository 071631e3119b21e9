"""A rank's teacher: the bytes that it takes, and what is left of it once it has been dropped."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import torch
from _ranks import in_group

from partool.plan.types import Plan
from partool_runtime.data import MicroBatch
from partool_runtime.mesh import build_ranks
from partool_runtime.preparation import prepare
from partool_runtime.torch_internals.tensors import local_bytes
from partool_runtime.weights import fill, post_load


def teacher_bytes(plan_json: str) -> tuple[int, int, int, float]:
    """Return the bytes of a rank's teacher, of its gathered parameters after a step, its live tensors, and the KL.

    The step comes before the teacher is dropped; live tensors are counted after that.
    """
    plan = Plan.model_validate_json(plan_json)
    with in_group():
        prepared = prepare(plan, build_ranks(plan, torch.device("cpu")), lambda done, sent_bytes: None)
        teacher, source = prepared.teacher, plan.teacher
        assert teacher is not None
        assert teacher.model is not None
        assert source is not None
        for model, weights in ((prepared.model, plan.weights), (teacher.model, source.weights)):
            fill(model, weights, seed=0)
            post_load(model)
        stored = local_bytes(teacher.model.parameters())
        shape = plan.layout.micro_batch, plan.training.sequence_length
        tokens_BS = torch.arange(shape[0] * shape[1]).view(shape) % plan.model.vocab
        micro = MicroBatch(tokens_BS, tokens_BS, torch.zeros(shape, dtype=torch.int32))
        prepared.passes.step([micro], torch.ones(()), lambda term: nullcontext())
        gathered, divergence = teacher.gathered_bytes(), teacher.figures()["kl"]
        live = [weakref.ref(parameter) for parameter in teacher.model.parameters()]
        del model
        teacher.at(teacher.steps - 1)
        assert teacher.model is not None
        teacher.at(teacher.steps)
        return stored, gathered, sum(each() is not None for each in live), divergence
