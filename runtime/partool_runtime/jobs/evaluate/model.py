"""The model of an evaluation: a rank's part with its weights, of which none is trained."""

from __future__ import annotations

from partool.plan.types import Plan
from partool_runtime.fused.self_check import with_working_parts
from partool_runtime.jobs.process import watch_compiler
from partool_runtime.mesh import Ranks
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.pulse import Pulse
from partool_runtime.telemetry import Recorder
from partool_runtime.torch_internals.tensors import local, local_bytes
from partool_runtime.weights import fill, post_load


def frozen_model(plan: Plan, ranks: Ranks, recorder: Recorder, pulse: Pulse) -> Prepared:
    """Return this rank's part of the model with its weights, of which none needs a gradient.

    Models drop nothing where gradients are off (:meth:`partool_runtime.usermodel.model.ModuleDecoder.logits`).
    """
    pulse.enter("preparing")
    watch_compiler(plan, pulse)
    prepared = prepare(with_working_parts(plan, ranks, recorder.warning), ranks, recorder.pipeline)
    for root in prepared.model.roots():
        root.requires_grad_(False)
    pulse.enter("loading")
    folder = None if plan.adapter is None else plan.adapter.weights
    for note in fill(prepared.model, plan.weights, seed=plan.training.seed, adapter=folder, group=ranks.world):
        recorder.warning(note)
    post_load(prepared.model)
    on_device = (p for p in prepared.model.parameters() if local(p).device == ranks.device)
    recorder.note_memory("parameters", local_bytes(on_device))
    return prepared
