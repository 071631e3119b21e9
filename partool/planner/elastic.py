"""Plans for the same training on fewer nodes, with a smaller data-parallel degree.

Tensor, pipeline, sequence and expert parallelism keep their degrees, and the global batch stays the same: with fewer
data-parallel ranks, each rank runs more micro-batches per step. The contents of a checkpoint do not depend on the
number of ranks, so a run continues where it stopped.
"""

from __future__ import annotations

from dataclasses import replace

from partool.cost.case import RECOMPUTE
from partool.cost.training.gathers import controls_of_layout
from partool.cost.training.one_bit import one_bit_updates
from partool.cost.training.optimizer import adapted, matrix_updates, moments_of
from partool.cost.training.peak import host_bytes, predict_memory
from partool.cost.training.predict import predict_time
from partool.cost.training.saved import saved_state
from partool.diagnostics.record import Diagnostic
from partool.plan.layout import Layout, Mesh
from partool.plan.schedule import refuses, sealed
from partool.plan.types import MemoryPrediction, Plan, Prediction
from partool.planner.allocator import expandable
from partool.planner.findings import saves
from partool.planner.forms.runnable import gaps, task_of
from partool.planner.problem import divisors
from partool.planner.rules.launching import environment
from partool.planner.search.price import host_room
from partool.planner.stopping import decided, forecast
from partool.spec.hardware import Devices, LimitsSpec
from partool.spec.numbers import GIB
from partool.spec.targets.rules import rules_of
from partool.strategies.jobs import JOBS
from partool.work.blocks import divided_model
from partool.work.distillation import with_teacher
from partool.work.evaluation import forward_only
from partool.work.stacks import stack_of
from partool.work.traced import Trace, shipped
from partool.work.training import TrainingWork

_PATH = ("launch", "min_nodes")
_WEIGHTS = {"note": 1, "warning": 2, "error": 3}


def sizes(plan: Plan, trace: Trace | None = None) -> tuple[dict[int, Plan], list[str]]:
    """Return (number of nodes → plan, reasons why other numbers have no plan), from ``launch.min_nodes`` nodes up.

    ``trace`` has the bytes that blocks save; None means the data that come with partool.
    """
    plans: dict[int, Plan] = {}
    reasons: list[str] = []
    for nodes in range(plan.launch.min_nodes or plan.devices.nodes, plan.devices.nodes):
        smaller = resized(plan, nodes, trace)
        if isinstance(smaller, Plan):
            plans[nodes] = smaller
        else:
            reasons.append(f"no plan for {_nodes(nodes)}: {smaller}")
    return plans, reasons


def check_elastic(plan: Plan, trace: Trace | None = None) -> list[Diagnostic]:
    """Return an error if no smaller number of nodes has a plan, a note that lists the numbers without one, and limits.

    The limits are findings about time limits that hold for the fewest nodes, and not for all of them.
    """
    plans, reasons = sizes(plan, trace)
    limits = _limits_at(plans[min(plans)], plan) if plans else []
    if not reasons:
        return limits
    if plans:
        help = f"given so many, the run uses fewer ({_listed(plans)}); to use all, change what the reason names"
        return [Diagnostic("PT531", "; ".join(reasons), severity="note", path=_PATH, help=help), *limits]
    message = f"min_nodes: {plan.launch.min_nodes}, but the run cannot go on with fewer nodes: {'; '.join(reasons)}"
    help = "drop min_nodes, or leave room: a larger global_batch with more divisors, fewer tensor or pipeline ranks"
    return [Diagnostic("PT530", message, path=_PATH, help=help)]


def _limits_at(smallest: Plan, plan: Plan) -> list[Diagnostic]:
    """Return the findings about time limits (PT527) that are worse for ``smallest`` than for ``plan``."""
    rules = rules_of(plan.launch.target)
    worst: dict[tuple[str | int, ...], int] = {}
    for usual in rules.about_duration(plan.launch, forecast(plan)):
        worst[usual.path] = max(worst.get(usual.path, 0), _WEIGHTS[usual.severity])
    where = f"with {_nodes(smallest.devices.nodes)}, the fewest that min_nodes allows"
    return [
        replace(limit, message=f"{where}, {limit.message}")
        for limit in rules.about_duration(smallest.launch, forecast(smallest))
        if limit.code == "PT527" and _WEIGHTS[limit.severity] > worst.get(limit.path, 0)
    ]


def resized(plan: Plan, nodes: int, trace: Trace | None = None) -> Plan | str:
    """Return the plan for ``nodes`` nodes, fewer than in ``plan``, or the reason why no such plan exists.

    Every step trains on the same sequences in the same order. As there are fewer ranks, each holds more sharded state.
    If memory is then too small, micro-batches become smaller or more activations are recomputed, which does not change
    results; the fastest layout that fits is taken. Memory and time are predicted again.
    """
    if not 0 < nodes < plan.devices.nodes:
        return f"the plan has {_nodes(plan.devices.nodes)}, fewer are asked for"
    layouts = _layouts(plan, nodes)
    if isinstance(layouts, str):
        return layouts
    devices = plan.devices.model_copy(update={"nodes": nodes})
    missing = gaps(task_of(plan, devices), layouts[0])
    if missing and plan.runnable:
        return f"the runtime does not run {missing[0].what} yet"
    chosen = _fitting(plan, job_of_plan(plan, devices, trace), layouts)
    if isinstance(chosen, str):
        return chosen
    layout, prediction = chosen
    explanations = {
        "alternatives": (),
        "candidates": (),
        "search": None,
        "limit": "",
        "reasons": (_reason(plan, layout),),
    }
    runs = {"runnable": not missing, "not_runnable": tuple(gap.code for gap in missing)}
    variables = environment(plan.launch, devices)  # a single node needs no network variables
    changed = {"devices": devices, "layout": layout, "environment": variables, "prediction": prediction}
    resized_plan = plan.model_copy(update={**changed, **explanations, **runs})
    asked = str(plan.spec.get("checkpoint", {}).get("mode", "auto"))
    with_saves, _ = saves.with_decided_mode(saves.with_mode(resized_plan, asked))
    return decided(with_saves)


def _layouts(plan: Plan, nodes: int) -> list[Layout] | str:
    """Return the layouts to try on ``nodes`` nodes, or the reason why there are none.

    The first layout differs least from the plan's layout; the last layout needs least memory.
    """
    layout, ranks = plan.layout, nodes * plan.devices.per_node
    mesh = layout.mesh
    fixed = mesh.tp * mesh.pp * mesh.cp
    if ranks % fixed:
        needs = f"needs {fixed} ranks" if ranks < fixed else f"takes {fixed} ranks at a time"
        return f"{_degrees(mesh)} {needs}, {_nodes(nodes)} {'has' if nodes == 1 else 'have'} {ranks}"
    dp, batch = ranks // fixed, plan.training.global_batch
    sharers = _shard(mesh, dp) * mesh.cp * mesh.tp
    if sharers % layout.expert_ranks:
        parts = f" × expert_tensor {layout.expert_tensor}" if layout.expert_tensor > 1 else ""
        return f"expert {layout.expert}{parts} does not divide the {sharers} ranks that would share the experts"
    if batch % dp:
        return f"global batch {batch} does not divide by {dp} data-parallel ranks"
    share = batch // dp
    micro = [n for n in divisors(share) if n <= layout.micro_batch and refuses(layout, share // n) is None]
    if not micro:
        why = refuses(layout, share // min(layout.micro_batch, share)) or "no micro-batch divides them"
        return f"{share} sequences per rank cannot be cut for the schedule: {why}"
    shard = _shard(mesh, dp)
    policies = dict.fromkeys([layout.recompute, *((policy,) * len(layout.recompute) for policy in RECOMPUTE[1:])])
    return [
        layout.changed(
            {
                "data.shard": shard,
                "recompute": policy,
                "micro_batch": size,
                "derived.replicas": dp // shard,
                "derived.accumulation": share // size,
                "derived.schedule_hash": "",
            }
        )
        for policy in policies
        for size in reversed(micro)
    ]


def _fitting(plan: Plan, job: TrainingWork, layouts: list[Layout]) -> tuple[Layout, Prediction] | str:
    """Return the first layout if it fits, else the fastest layout that fits.

    If no layout fits, return the reason why the last layout does not fit.
    """
    steps, fitting = plan.training.steps, []
    lacking = ""
    for index, layout in enumerate(layouts):
        memory = predict_memory(job, layout, _limits(plan).memory_headroom)
        lacking = _lacking(plan, job, layout, memory)
        if not lacking:
            fitting.append((predict_time(job, layout, steps), memory, layout))
            if index == 0:
                break
    if not fitting:
        return lacking
    time, memory, layout = min(fitting, key=lambda each: each[0].step_time_s)
    memory = memory.model_copy(update=saved_state(job, layout)._asdict())
    totals = plan.prediction.totals and plan.prediction.totals.priced(time.device_hours)
    return sealed(layout), plan.prediction.model_copy(update={"memory": memory, "time": time, "totals": totals})


def _shard(mesh: Mesh, dp: int) -> int:
    """Return how many of ``dp`` ranks share the state: 1 if the plan shards no state, ``dp`` if it has no replicas.

    With hybrid sharding, return the smallest divisor of ``dp`` that is at least the plan's ``dp_shard``.
    """
    if mesh.dp_shard == 1:
        return 1
    if mesh.dp_replicate == 1:
        return dp
    return next((n for n in divisors(dp) if n >= mesh.dp_shard), dp)


def job_of_plan(plan: Plan, devices: Devices, trace: Trace | None = None) -> TrainingWork:
    """Return the job that a plan prices, on these devices; ``trace`` is as in :func:`sizes`."""
    work = TrainingWork(
        expandable_segments=expandable(plan.launch, devices),
        model=divided_model(plan.model),
        devices=devices,
        sequence_length=plan.training.sequence_length,
        global_batch=plan.training.global_batch,
        precision=plan.training.precision,
        stack=stack_of(plan.engine, devices.backend, plan.layout.compile, plan.layout.derived.fused),
        trace=trace or shipped(),
        controls=controls_of_layout(plan.layout.data),
        frozen=plan.priced_frozen,
        time_scalar=plan.prediction.time_scalar,
        memory_scalar=plan.prediction.memory_scalar,
        moments=moments_of(plan.optimizer),
        matrices=matrix_updates(plan.optimizer, plan.training.precision),
        averages=plan.training.ema is not None,
        one_bit=one_bit_updates(plan.optimizer, plan.training, plan.checkpoint, plan.data.validates),
        adapt=adapted(plan.optimizer),
        perturbed=plan.training.adversarial.share(plan.training.steps),
        offload=plan.layout.offload,
        expert_imbalance=_limits(plan).expert_imbalance,
        expert_rank_capacity=plan.layout.expert_rank_capacity,
    )
    work = with_teacher(work, None if plan.teacher is None else plan.teacher.model, plan.training)
    return work.with_objective(plan.training.objective) if JOBS[plan.job].backward else forward_only(work)


def _limits(plan: Plan) -> LimitsSpec:
    """Return the limits that the spec states."""
    return LimitsSpec.model_validate(plan.spec.get("limits", {}))


def _lacking(plan: Plan, job: TrainingWork, layout: Layout, memory: MemoryPrediction) -> str:
    """Return text that says whether device or host memory is too small, with sizes; empty if the layout fits."""
    if memory.total_bytes > memory.capacity_bytes:
        need, have = memory.total_bytes / GIB, memory.capacity_bytes / GIB
        before = plan.prediction.memory.total_bytes / GIB
        return f"{need:.1f} GiB per rank would be needed ({before:.1f} now), of {have:.1f}: fewer ranks share the state"
    if not layout.offload.active:
        return ""
    need, have = host_bytes(job, layout) / GIB, host_room(job.devices) / GIB
    return f"{need:.0f} GiB of host memory per node would be needed, of {have:.0f}" if need > have else ""


def _reason(plan: Plan, after: Layout) -> str:
    before = plan.layout
    first, then = (f"{each.micro_batch} × {each.derived.accumulation}" for each in (before, after))
    batches = f"{first} → {then}"
    recompute = "" if before.recompute == after.recompute else f", recompute {after.recompute[0]} on all layers"
    ranks = f"data-parallel ranks {before.mesh.dp} → {after.mesh.dp}"
    return f"for fewer nodes than {plan.devices.nodes}: {ranks}, micro-batch {batches}{recompute}"


def _degrees(mesh: Mesh) -> str:
    degrees = {"tensor": mesh.tp, "pipeline": mesh.pp, "sequence": mesh.cp}
    return " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)


def _listed(plans: dict[int, Plan]) -> str:
    *some, last = map(str, sorted(plans))
    return f"{', '.join(some)} or {_nodes(int(last))}" if some else _nodes(int(last))


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
