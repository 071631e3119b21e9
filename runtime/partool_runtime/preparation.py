"""Construction of a rank's part of the model and its passes, for each way to distribute the model over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import finalize

import torch
from torch import nn

from partool.plan.teaching import of_teacher
from partool.plan.types import Plan
from partool.schedule import Schedule
from partool_runtime.adversarial import Perturbed, check_perturbable
from partool_runtime.data.batches import MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.fused import fuse
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.stages import HfParts
from partool_runtime.host import HostParts
from partool_runtime.losses import put_around_loss, set_loss
from partool_runtime.mesh import COLLECTIVE_TIMEOUT, Ranks
from partool_runtime.model import AnyDecoder, Decoder, DecoderParts, StagedDecoder
from partool_runtime.model.adapter import adapters_off
from partool_runtime.offload import Activations, Slabs
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.parameters import HostParameters
from partool_runtime.parallel import parallelize
from partool_runtime.parallel.expert.load import ExpertLoads
from partool_runtime.parallel.grad_sync import GradSync
from partool_runtime.parallel.passes import BeforePass, Passes, PlainPasses, Timer
from partool_runtime.parallel.pipeline.passes import Report, pipeline_passes, trained_schedule
from partool_runtime.parallel.pipeline.types import Done
from partool_runtime.parallel.preferences import PreferenceLoss
from partool_runtime.parallel.reference import ReferencePasses
from partool_runtime.parallel.scoring import Scoring
from partool_runtime.parallel.sequence.batches import SharedSequences
from partool_runtime.parallel.teacher import Teacher
from partool_runtime.parallel.tensor.sync import TensorGradients
from partool_runtime.parallel.weipipe.parts import RingDecoder
from partool_runtime.parallel.weipipe.passes import WeiPipePasses
from partool_runtime.parallel.weipipe.ring import open_ring
from partool_runtime.parallel.zero import grads_stay_16bit, shard, shard_stages
from partool_runtime.precision import COMPUTE_DTYPE, MASTER_DTYPE
from partool_runtime.torch_internals.fsdp import gathered_bytes, gradient_bytes, wide_gradients
from partool_runtime.usermodel.model import ModuleDecoder
from partool_runtime.weights import build, build_parts, freeze, materialise, narrow, poison

_SPARE = 1.1
"""Ratio of the host memory reserved for layers to the predicted amount; memory added during the run is slower."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank's part of a model, whose memory is allocated, and the passes that run the part."""

    model: AnyDecoder
    passes: Passes
    gathered_bytes: Callable[[], int]
    """Returns the bytes of gathered parameters that the rank holds for computation."""
    gradient_bytes: Callable[[], int]
    """Returns the bytes of gradients that the rank holds."""
    memory: HostMemory
    """Owns the rank's pinned host memory."""
    sync: GradSync | None = None
    """Signals that a parameter's gradient is reduced; None if all gradients are complete only after the passes."""
    grads_ready_after_passes: frozenset[str] = frozenset()
    """Names of parameters whose gradients are complete only after the passes, even if ``sync`` signals earlier."""
    shards: HostParameters | None = None
    """Stores the parameters' shards outside of the device; None if the shards are on the device."""
    host: HostParts = field(default_factory=HostParts)
    loads: ExpertLoads | None = None
    """Loads of the experts; None for a dense model."""
    preferences: PreferenceLoss | None = None
    """The objective of pairs of answers; None where each token counts by itself."""
    scoring: Scoring | None = None
    """Yields the log-likelihoods that tasks ask for; None where there are no tasks."""
    frozen_copy: Prepared | None = None
    """The model whose log-probabilities the objective compares, if it is a second one in memory."""
    teacher: Teacher | None = None
    """The model whose predictions the trained one learns; None without one."""

    @property
    def model_passes(self) -> Passes:
        """The passes of the model itself, where :attr:`passes` come after those of a reference."""
        return self.passes.trained if isinstance(self.passes, ReferencePasses) else self.passes

    @classmethod
    def sharded(
        cls,
        model: AnyDecoder,
        passes: Passes,
        memory: HostMemory,
        sync: GradSync | None = None,
        grads_ready_after_passes: frozenset[str] = frozenset(),
        *,
        shards: HostParameters | None = None,
        host: HostParts,
        loads: ExpertLoads | None = None,
        preferences: PreferenceLoss | None = None,
        scoring: Scoring | None = None,
        teacher: Teacher | None = None,
    ) -> Prepared:
        """Return :class:`Prepared` for a part whose parameters FSDP2 gathers and whose gradients FSDP2 reduces."""
        roots = model.roots()
        gathered, gradients = lambda: sum(map(gathered_bytes, roots)), lambda: sum(map(gradient_bytes, roots))
        ready = grads_ready_after_passes
        rest = (sync, ready, shards, host, loads, preferences, scoring)
        return cls(model, passes, gathered, gradients, memory, *rest, teacher=teacher)


def prepare(plan: Plan, ranks: Ranks, report: Report, host: HostParts | None = None) -> Prepared:
    """Return this rank's part of the plan's model, without weights, and its passes; a collective of all ranks.

    With a pipeline, ``report`` is called after every training step with the actions of the step. Raises
    ConfigurationError PT498 for perturbed embeddings where they do not run, and PT420 for pairs of answers.
    """
    host = host or HostParts()
    if plan.training.adversarial.epsilon:
        check_perturbable(plan)
    teacher = _teacher(plan, ranks, host)
    prepared = _prepared(plan, ranks, report, host, teacher=teacher)
    if prepared.scoring is not None:
        prepared.scoring.passes = prepared.passes  # without those of a reference
    if prepared.preferences is None or not plan.training.objective.refers_in_steps:
        return prepared
    return _with_reference(prepared, prepared.preferences, plan, ranks, host)


def _with_reference(
    prepared: Prepared, preferences: PreferenceLoss, plan: Plan, ranks: Ranks, host: HostParts
) -> Prepared:
    """Return ``prepared`` with passes that follow those of the reference."""
    if plan.training.objective.reference == "adapter_off":
        within = partial(adapters_off, prepared.model)
        passes = ReferencePasses(
            prepared.passes, preferences, reference=prepared.passes, recorder=preferences, within=within
        )
        return replace(prepared, passes=passes)
    copy = _prepared(plan, ranks, lambda timed_actions, sent_bytes: None, host, trains=False)
    assert copy.preferences is not None, "it has the objective of the plan"
    passes = ReferencePasses(
        prepared.passes, preferences, reference=copy.passes, recorder=copy.preferences, within=nullcontext
    )
    return replace(prepared, passes=passes, frozen_copy=copy)


def _teacher(plan: Plan, ranks: Ranks, host: HostParts) -> Teacher | None:
    """Return the plan's teacher, frozen and without weights; None if it has none.

    Raises ConfigurationError PT404 in a pipeline and on two-dimensional tensor ranks.
    """
    of_plan, spec = of_teacher(plan), plan.training.distill
    if of_plan is None or spec is None:
        return None
    if plan.layout.mesh.pp > 1 or plan.layout.tensor.inner > 1:
        message = "a teacher does not run in a pipeline or on two-dimensional tensor ranks"
        raise ConfigurationError("PT404", message, "Plan it again.")
    prepared = _plain(of_plan, ranks, host, trains=False)
    assert prepared.sync is not None, "a model of one stage is sharded as a whole"
    with ranks.tensors():
        steps = spec.taught_steps(plan.training.steps)
        return Teacher(spec, prepared.model, prepared.sync, ranks, steps=steps)


def _prepared(
    plan: Plan, ranks: Ranks, report: Report, host: HostParts, *, trains: bool = True, teacher: Teacher | None = None
) -> Prepared:
    """Return a rank's part of the model; without ``trains`` every parameter is frozen."""
    if plan.layout.mesh.pp == 1:
        return _plain(plan, ranks, host, trains=trains, teacher=teacher)
    schedule = trained_schedule(plan)
    if schedule.moves != "activations" and plan.training.objective.prefers:
        message = f"objective: {plan.training.objective.kind} does not run where {schedule.name} moves weights"
        raise ConfigurationError("PT420", message, "Plan it again.")
    if schedule.moves == "activations":
        return _stages(plan, schedule, ranks, report, host, trains=trains)
    return _ring(plan, schedule, ranks, report, host)


def _offload(
    plan: Plan, memory: HostMemory, host: HostParts, device: torch.device, blocks: Mapping[int, nn.Module]
) -> None:
    """If the plan says so, make layers keep saved activations in the rank's pinned host memory."""
    if plan.layout.offload.activations != "cpu":
        return
    slabs, lanes = Slabs(memory), host.lanes(device)
    slabs.reserve(round(_SPARE * plan.prediction.memory.host_terms_bytes.get("activations", 0)))
    keeper = Activations(device, slabs=slabs, lanes=lanes)
    finalize(keeper, lanes.close)
    keeper.put(blocks, last=plan.model.layers - 1)


def _preferences(model: nn.Module, plan: Plan, ranks: Ranks) -> PreferenceLoss | None:
    """If training compares pairs of answers, put their loss around that of the model; a collective of all ranks."""
    if not plan.training.objective.prefers:
        return None
    with ranks.tensors():
        preferences = PreferenceLoss(plan.training.objective, ranks)
    put_around_loss(model, preferences.around)
    return preferences


def _losses(
    model: nn.Module, plan: Plan, ranks: Ranks, teacher: Teacher | None = None
) -> tuple[PreferenceLoss | None, Scoring | None, BeforePass | None]:
    """Put around the model's loss what the plan asks for; return it, and what learns of each pass; a collective."""
    scoring = Scoring(model, ranks) if plan.evaluation.tasks else None
    preferences = _preferences(model, plan, ranks)
    before = None if preferences is None else preferences.begin
    if teacher is not None:  # pairs of answers have none
        put_around_loss(model, teacher.around)
        before = teacher.begin
    if scoring is None:
        return preferences, None, before
    scoring.put(model)
    return preferences, scoring, scoring.before(before)


def _plain(plan: Plan, ranks: Ranks, host: HostParts, *, trains: bool, teacher: Teacher | None = None) -> Prepared:
    model = _model(plan, ranks).to(MASTER_DTYPE[plan.training.precision])
    memory = _host_memory(plan, ranks.device, host)
    parallelize(model, plan, ranks, offload=partial(_offload, plan, memory, host, ranks.device), read=host.read_rows)
    preferences, scoring, before = _losses(model, plan, ranks, teacher)
    _freeze(model, plan, trains=trains)  # outside of the context: fake tensors are no data of parameters on meta
    with ranks.tensors():
        _own_buffers(model)
        sync = shard(model, layout=plan.layout, precision=plan.training.precision, ranks=ranks)
        shards = _give_memory(model, plan, ranks, memory, host)
        _accumulate_in_master_dtype(model, plan)
        tensor = TensorGradients.of(model, plan, ranks)
        loads = ExpertLoads.of(model, plan, ranks)
        perturb = None
        if plan.training.adversarial.epsilon and not isinstance(model, ModuleDecoder):
            perturb = Perturbed(model, sync, plan, ranks).find
    passes = _of_shares(PlainPasses(model, sync, ranks.device, tensor, perturb, before=before), plan, ranks)
    grads_ready_after_passes = TensorGradients.names(model)
    return Prepared.sharded(
        model,
        passes,
        memory,
        sync,
        grads_ready_after_passes,
        shards=shards,
        host=host,
        loads=loads,
        preferences=preferences,
        scoring=scoring,
        teacher=teacher,
    )


def _freeze(model: AnyDecoder, plan: Plan, *, trains: bool) -> None:
    """Freeze what the plan does not train, and store it in no more bits than it needs.

    Without ``trains`` that is everything.
    """
    freeze(model, plan.frozen)
    if not trains:
        model.requires_grad_(False)
    narrow(model, plan.frozen, COMPUTE_DTYPE[plan.training.precision])


def _own_buffers(model: nn.Module) -> None:
    """Replace buffers that already have values by copies, which belong to the ranks' context of tensors."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.clone())


def _give_memory(
    model: AnyDecoder, plan: Plan, ranks: Ranks, memory: HostMemory, host: HostParts
) -> HostParameters | None:
    """Allocate a sharded model's memory; return the store of its shards, or None if the shards are on the device."""
    if plan.layout.offload.parameters == "none":
        materialise(model, ranks.device)
        return None
    disk = plan.layout.offload if plan.layout.offload.parameters == "nvme" else None
    shards = HostParameters(
        model.roots(),
        ranks.device,
        memory=memory,
        lanes=host.lanes(ranks.device),
        disk=disk,
        owner=f"rank {ranks.rank}",
        shard_file=host.shard_file,
    )
    for root in model.roots() if disk is None else ():  # a new file holds zeros; filling in NaN would write it twice
        poison(root)
    return shards


def _host_memory(plan: Plan, device: torch.device, host: HostParts) -> HostMemory:
    """Return the owner of a rank's pinned host memory, whose size the plan limits."""
    return host.memory(pinned=device.type == "cuda", limit_bytes=plan.layout.offload.pinned_limit_bytes)


def _accumulate_in_master_dtype(model: StagedDecoder, plan: Plan) -> None:
    """Make an offloaded model with 16-bit parameters sum gradients in the type that a model without offload uses."""
    if plan.layout.offload.optimizer != "none" and not grads_stay_16bit(plan.layout):
        for root in model.roots():
            wide_gradients(root, MASTER_DTYPE[plan.training.precision])


def _model(plan: Plan, ranks: Ranks) -> Decoder | HfDecoder | ModuleDecoder:
    """Return the plan's model on the meta device: partool's own, or one of transformers or of the user."""
    if plan.module is not None:
        _seed(plan, ranks)
        return ModuleDecoder(plan.module, plan.model, plan.training.seed)
    if plan.hf is None:
        decoder = build(plan.model)
        decoder.contexts.seed = plan.training.seed
        decoder.multi_token.weight = plan.training.multi_token_weight
        return decoder
    adapter = None if plan.adapter is None else plan.adapter.form
    model = HfDecoder(plan.hf, plan.model, wide=plan.training.precision == "fp64", adapter=adapter)
    _seed(plan, ranks)
    return model


def _parts(plan: Plan, mine: Sequence[int], ranks: Ranks) -> DecoderParts | HfParts:
    if plan.hf is None:
        decoder = build_parts(plan.model, plan.layout.pipeline.bounds, mine)
        for stage in decoder.stages.values():
            stage.contexts.seed = plan.training.seed
        return decoder
    wide, adapter = plan.training.precision == "fp64", None if plan.adapter is None else plan.adapter.form
    parts = HfParts(plan.hf, plan.model, plan.layout.pipeline.bounds, mine, wide=wide, adapter=adapter)
    _seed(plan, ranks)
    return parts


def _seed(plan: Plan, ranks: Ranks) -> None:
    """Seed dropout with different seeds on ranks with different tokens, and with equal seeds on tensor ranks."""
    stream = ranks.pp.place * ranks.dp.size + ranks.dp.place
    stream = stream * ranks.cp.size + ranks.cp.place
    torch.manual_seed(plan.training.seed * ranks.world_size + stream)


def _stages(plan: Plan, schedule: Schedule, ranks: Ranks, report: Report, host: HostParts, *, trains: bool) -> Prepared:
    mine = schedule.on_rank(ranks.pp.place)
    parts = _parts(plan, mine, ranks).to(MASTER_DTYPE[plan.training.precision])
    memory = _host_memory(plan, ranks.device, host)
    parallelize(parts, plan, ranks, offload=partial(_offload, plan, memory, host, ranks.device), read=host.read_rows)
    preferences, scoring, before = _losses(parts, plan, ranks)
    _freeze(parts, plan, trains=trains)
    with ranks.tensors():
        _own_buffers(parts)
        units = shard_stages(parts, layout=plan.layout, precision=plan.training.precision, ranks=ranks)
        shards = _give_memory(parts, plan, ranks, memory, host)
        _accumulate_in_master_dtype(parts, plan)
        passes = pipeline_passes(parts, units, schedule, plan=plan, ranks=ranks, report=report, before=before)
        loads = ExpertLoads.of(parts, plan, ranks)
    passes_of_share = _of_shares(passes, plan, ranks)
    return Prepared.sharded(
        parts,
        passes_of_share,
        memory,
        shards=shards,
        host=host,
        loads=loads,
        preferences=preferences,
        scoring=scoring,
    )


def _of_shares(passes: Passes, plan: Plan, ranks: Ranks) -> Passes:
    """Return passes that take whole sequences and run ``passes`` on this rank's share of their tokens."""
    return (
        passes if ranks.cp.size == 1 else SharedSequences(passes, plan.shares, ranks.cp.place, plan.model.predictions)
    )


def _ring(plan: Plan, schedule: Schedule, ranks: Ranks, report: Report, host: HostParts) -> Prepared:
    if ranks.cp.size > 1:
        raise ConfigurationError("PT650", f"{schedule.name} keeps whole sequences on a rank", "Plan it again.")
    if plan.layout.offload.optimizer != "none":
        message = f"{schedule.name} moves weights from rank to rank: an optimizer in host memory has none of them"
        raise ConfigurationError("PT664", message, "another schedule, or parallel.offload.optimizer: none")
    with torch.device("meta"):
        model = RingDecoder(plan.model, plan.layout.pipeline.bounds, schedule.on_rank(ranks.pp.place))
    with ranks.tensors():
        return _of_ring(model, plan, schedule, ranks, report, host=host)


def _of_ring(
    model: RingDecoder, plan: Plan, schedule: Schedule, ranks: Ranks, report: Report, *, host: HostParts
) -> Prepared:
    materialise(model, ranks.device, MASTER_DTYPE[plan.training.precision])
    frozen = freeze(model, plan.frozen)
    for name, parameter in model.elsewhere():
        parameter.requires_grad_(name not in frozen)
    for module in (model.first, *model.stages, model.last):
        fuse(module, plan)
    if plan.training.z_loss:
        set_loss(model.last, z_loss=plan.training.z_loss)
    # Every rank has these parameters with the same gradient, which only one rank counts.
    model.copies = model.replicated() if ranks.pp.place else frozenset()
    timed_actions: list[Done] = []
    timeout_s = COLLECTIVE_TIMEOUT.total_seconds()
    passes = WeiPipePasses(
        schedule,
        model,
        open_ring(ranks.groups, ranks.pp.parts, timeout_s=timeout_s),
        COMPUTE_DTYPE[plan.training.precision],
        replicas=ranks.groups.of(ranks.dp.parts),
        everyone=ranks.world,
        watch=timed_actions.append,
        timeout_s=timeout_s,
        lane=host.ring_lane,
    )
    reported = _Reported(passes, timed_actions, report)
    return Prepared(
        model,
        reported,
        lambda: passes.copies_bytes,
        lambda: passes.gradient_bytes,
        _host_memory(plan, ranks.device, host),
        host=host,
    )


class _Reported:
    """Passes whose actions are reported after each training step."""

    def __init__(self, passes: WeiPipePasses, timed_actions: list[Done], report: Report) -> None:
        self._passes, self._timed_actions, self._report = passes, timed_actions, report

    def step(self, batch: Sequence[MicroBatch], weight: torch.Tensor, timer: Timer) -> torch.Tensor:
        """See ``Passes``."""
        self._timed_actions.clear()
        before_bytes = self._passes.sent_bytes
        loss_sum = self._passes.step(batch, weight, timer)
        self._report(self._timed_actions, self._passes.sent_bytes - before_bytes)
        return loss_sum

    def evaluate(self, batches: Iterable[MicroBatch], stopping: Callable[[], bool]) -> torch.Tensor | None:
        """See ``Passes``."""
        return self._passes.evaluate(batches, stopping)

    def close(self) -> None:
        """See ``Passes``."""
        self._passes.close()
