"""Runs one rank's steps of a plan, on fake tensors or on real ones, and returns what the rank did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import prod

import numpy as np
import torch

from partool.plan.rank_trace import CheckpointBlock, CheckpointTrace, Collective, ExecutedParts, RankTrace
from partool.plan.types import Plan
from partool_runtime.checkpoint import StatePart, parts_to_load, parts_to_save
from partool_runtime.data.batches import AnswerPairs, MicroBatch
from partool_runtime.dry.allocator import CachingAllocator
from partool_runtime.dry.host import Tensors, absent_host
from partool_runtime.dry.layer_log import LayerLog, Unequal, UnequalLayers
from partool_runtime.dry.layers import repeat_layers, stages_of
from partool_runtime.dry.marks import MarkedBatch, Marks
from partool_runtime.dry.memory import MemoryRecord
from partool_runtime.dry.owners import loss_known
from partool_runtime.dry.record import CollectiveRecord
from partool_runtime.dry.repeat import Shorter, shorter
from partool_runtime.dry.world import alone_in, fake_tensors
from partool_runtime.host import HostParts
from partool_runtime.jobs.train.saving import state_of
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.losses import put_around_loss
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.offload.install import open_optimizer
from partool_runtime.offload.optimizer import HostOptimizer
from partool_runtime.parallel.comm import maximum_over
from partool_runtime.pieces import Value
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.torch_internals.fsdp import unreduced_gradients
from partool_runtime.torch_internals.tensors import without_modes


def dry_rank(plan: Plan, rank: int, *, compiled: bool = False, repeat: bool = True) -> RankTrace:
    """Execute a rank's steps on fake tensors, without the other ranks; see :func:`fake_tensors` for ``compiled``.

    With ``repeat`` the passes of equal micro-batches (:mod:`partool_runtime.dry.repeat`), of equal layers
    (:mod:`partool_runtime.dry.layers`) and of a layer for equal micro-batches (:mod:`partool_runtime.dry.layer_steps`)
    are executed once. If some of them turn out unequal, all of them run.
    """
    device = torch.device("cuda", 0)
    if plan.devices.backend == "cpu":
        device, plan = torch.device("cpu"), _without_host_kernels(plan)
    passes, layers, micro_batches, unequal = repeat, repeat, repeat, ""
    while True:
        with alone_in(plan.layout.mesh.world_size, rank), fake_tensors(compiled=compiled) as tensors:
            ranks = replace(build_ranks(plan, device), tensors=tensors)
            fewer = shorter(plan, ranks.pp.place) if micro_batches else None
            try:
                trace = traced(fewer.plan if fewer else plan, ranks, absent_host, fewer, layers=layers, passes=passes)
            except UnequalLayers as error:
                passes, layers, unequal = False, passes, str(error)
            except Unequal as error:
                micro_batches, unequal = False, str(error)
            else:
                return trace if not unequal else _with_reason(trace, unequal)


def _with_reason(trace: RankTrace, unequal: str) -> RankTrace:
    """Return the trace with the reason why equal parts all ran."""
    executed = trace.executed and trace.executed.model_copy(update={"unequal": unequal})
    return trace.model_copy(update={"executed": executed})


def _without_host_kernels(plan: Plan) -> Plan:
    """Return a plan for CPUs whose steps call torch only; the exchanges between ranks stay the same."""
    return plan.model_copy(update={"kernels": plan.kernels.model_copy(update={"mode": "torch"})})


def traced(
    plan: Plan,
    ranks: Ranks,
    host: Callable[[Tensors], HostParts] | None = None,
    fewer: Shorter | None = None,
    *,
    layers: bool = False,
    passes: bool = False,
) -> RankTrace:
    """Execute two steps of a plan on ``ranks``, real or not, and return the second step's trace.

    ``host`` returns the parts of the host, given the context in which tensors are made and recorded.
    With ``fewer``, ``plan`` is its plan, and the trace is that of the plan for which it stands; raises
    :class:`~partool_runtime.dry.layer_log.Unequal` if it stands for none. With ``layers`` equal layers are executed
    once (:mod:`partool_runtime.dry.layers`), with ``passes`` also a layer's equal passes; raises ``UnequalLayers`` if
    layers or passes that seem equal are not.
    """
    started_s = time.process_time()
    memory = MemoryRecord(ranks.device.type)
    record = CollectiveRecord(memory)
    marks = Marks(fewer.terms if fewer else frozenset(), memory, record)
    ranks = replace(ranks, tensors=_both(ranks.tensors, record))
    with memory.watching():
        prepared = prepare(plan, ranks, lambda computed, sent_bytes: None, host(ranks.tensors) if host else None)
        memory.know(prepared.model)
        put_around_loss(prepared.model, loss_known)
        with ranks.tensors():
            stepper = _stepper(plan, prepared, ranks, memory)
            checkpoint = checkpoint_trace(
                state_of(prepared.model, stepper.optimizer, trained_only=plan.adapter is not None)
            )
            memory.phase = "activations"
            batch = MarkedBatch(micro_batches(plan), marks)
            log = LayerLog(memory, record)
            if layers:
                repeat_layers(plan, prepared.model, log, passes=passes)
            for step in range(2):
                record.restart()
                memory.begin()
                log.begin_step()
                marks.step()
                stepper.step(step, batch, _Phases(memory, prepared, stepper.optimizer, marks))
                log.end_step()
            order, operators = fewer.composed(marks) if fewer else marks.plain()
            memory_trace = memory.trace(_allocator(plan))
            log.active = False
            evaluation_order = evaluated(plan, stepper, ranks, batch[0], record.vocabulary)
    stepper.optimizer.close()
    prepared.passes.close()
    prepared.memory.close()
    return RankTrace(
        rank=ranks.rank,
        vocabulary=tuple(record.vocabulary),
        order=tuple(order),
        evaluation_order=evaluation_order,
        checkpoint=checkpoint,
        operators=operators,
        seconds=time.process_time() - started_s,
        memory=memory_trace,
        executed=_executed(plan, prepared, log, fewer),
    )


def _executed(plan: Plan, prepared: Prepared, log: LayerLog, fewer: Shorter | None) -> ExecutedParts:
    """Return how much of a step ran; ``plan`` is that of ``fewer``, if any."""
    layers = sum(map(len, stages_of(plan, prepared.model))) or plan.model.layers
    ran = plan.layout.derived.accumulation
    return ExecutedParts(
        layers=layers - len(log.repeated),
        of_layers=layers,
        micro_batches=ran,
        of_micro_batches=fewer.micro_batches if fewer else ran,
        passes=log.passes,
        of_passes=log.of_passes,
    )


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def _allocator(plan: Plan) -> CachingAllocator | None:
    """Return a model of the allocator of the plan's devices, with the settings of the plan's environment."""
    if plan.devices.backend == "cpu":
        return None
    settings = [variable.value for variable in plan.environment if variable.name in _ALLOCATOR_VARIABLES]
    expandable = any("expandable_segments:true" in setting.lower() for setting in settings)
    return CachingAllocator(expandable=expandable, capacity_bytes=plan.devices.memory_bytes)


def _both(tensors: Tensors, record: CollectiveRecord) -> Tensors:
    """Return a function that returns the context ``tensors()`` with ``record`` inside of it."""

    @contextmanager
    def entered() -> Iterator[None]:
        with tensors(), record:
            yield

    return entered


def _stepper(plan: Plan, prepared: Prepared, ranks: Ranks, memory: MemoryRecord) -> Stepper:
    memory.phase = "optimizer"
    optimizer = open_optimizer(plan, prepared, ranks)
    scaler = LossScaler(plan.training.precision == "fp16")
    training, spec = plan.training, plan.optimizer
    return Stepper(
        prepared.passes,
        optimizer,
        scaler,
        ranks=ranks,
        training=training,
        spec=spec,
        kernels=plan.kernels.mode,
        loads=prepared.loads,
        preferences=prepared.preferences,
    )


class _Phases:
    """The timer of a step: tells the record of memory which part of the step runs."""

    def __init__(self, memory: MemoryRecord, prepared: Prepared, optimizer: object, marks: Marks) -> None:
        self._marks, self._roots = marks, prepared.model.roots()
        self._optimizer = optimizer
        self._memory, self._parameters = memory, dict(prepared.model.named_parameters())
        memory.phase = "activations"

    def __call__(self, term: str) -> AbstractContextManager[None]:
        # Gradients that a backward pass has left unreduced accumulate over the micro-batches.
        for root in self._roots:
            self._memory.belongs("gradients", unreduced_gradients(root))
        if term in ("optimizer", "offload") and self._memory.phase == "activations":
            self._memory.belongs("gradients", {name: each.grad for name, each in self._parameters.items()})
            if isinstance(self._optimizer, HostOptimizer):
                self._memory.belongs("gradients", self._optimizer.gradients_on_device)
            self._memory.phase = "optimizer"
        self._marks.term(term)
        return nullcontext()


def micro_batches(plan: Plan) -> list[MicroBatch]:
    """Return the micro-batches of a step, whose tokens are all 0; if the plan perturbs embeddings, of such a step."""
    shape = plan.layout.micro_batch, plan.training.sequence_length
    tokens_BS = torch.zeros(shape, dtype=torch.int64)
    documents_BL = None
    if plan.data.attend == "document":
        documents_BL = torch.zeros(shape, dtype=torch.int32)
    pairs = _pairs(plan.layout.micro_batch) if plan.training.objective.prefers else None
    first = plan.training.adversarial.start_step * plan.training.global_batch
    return [MicroBatch(tokens_BS, tokens_BS, documents_BL, first, pairs)] * plan.layout.derived.accumulation


def _pairs(rows: int) -> AnswerPairs:
    """Return one pair of answers in each row."""
    lengths_D = torch.ones(2 * rows, dtype=torch.int64)
    reference_D = torch.zeros(2 * rows, dtype=torch.float64)
    return AnswerPairs(np.arange(2 * rows), torch.arange(rows) * 2, lengths_D, reference_D)


def evaluated(
    plan: Plan, stepper: Stepper, ranks: Ranks, micro: MicroBatch, vocabulary: dict[Collective, int]
) -> tuple[int, ...]:
    """Evaluate one micro-batch after a step, as the trainer does; return :attr:`RankTrace.evaluation_order`.

    Collectives that are not in ``vocabulary`` yet are added to it. The result is empty for a plan that holds no data
    out. The check for a stop request before each micro-batch is part of the evaluation.
    """
    if not plan.data.validates:
        return ()
    with CollectiveRecord() as record:
        record.vocabulary = vocabulary
        stepper.validate([micro], lambda: maximum_over(0, ranks.world, ranks.device) != 0)
    return tuple(record.order)


def checkpoint_trace(state: Mapping[str, Value]) -> CheckpointTrace:
    """Return the blocks of a rank's ``state`` (see :func:`partool_runtime.jobs.train.saving.state_of`) in checkpoints.

    The save and load plans are those of a run, before the ranks agree on who writes blocks that several of them hold.
    """
    with without_modes():  # torch reads offsets of shards from tensors that it makes
        saves, loads = list(parts_to_save(state)), list(parts_to_load(state))
    read, written = set(loads), set(saves)
    blocks = [_block(part, state[part.name], saved=True, loaded=part in read) for part in saves]
    blocks += [_block(part, state[part.name], saved=False, loaded=True) for part in loads if part not in written]
    sizes = [prod(part.sizes) * state[part.name].dtype.itemsize for part in saves]
    return CheckpointTrace(
        blocks=tuple(blocks),
        tensors=len(saves),
        size_bytes=sum(sizes),
        largest_bytes=max(sizes, default=0),
    )


def _block(part: StatePart, value: Value, *, saved: bool, loaded: bool) -> CheckpointBlock:
    dtype = str(value.dtype).removeprefix("torch.")
    return CheckpointBlock(part.name, tuple(value.shape), dtype, part.offsets, part.sizes, saved, loaded)
