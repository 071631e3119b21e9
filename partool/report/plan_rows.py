"""The rows of a plan's screen: label and text for model, machines, training, data, layout, memory and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from partool.layout.parameters import count, is_frozen, parameters
from partool.layout.quantised import quantised_names, stored_bytes
from partool.plan.terms import MEMORY_TERMS, TIME_TERMS
from partool.plan.totals import Totals
from partool.plan.types import Plan, TeacherModel
from partool.planner.stopping import LONG_RUN_S, in_words, worst_loss
from partool.report import environment
from partool.report.units import amount, bars, counted, gib, in_order, probability, seconds, size
from partool.spec.adapter import AdapterSpec
from partool.spec.evaluation import is_file
from partool.spec.numbers import duration
from partool.strategies.jobs import JOBS

Row = tuple[str, str]
_IN = {"cpu": "in host memory", "nvme": "in files"}
_NAMED = 4
"""Most terms of memory or time that a row names; the others are summed up."""
_SHOWN = 0.01
"""Terms below this share are not named."""
_SOURCE = 40
"""Most characters of a data source that a row shows."""
_ENVIRONMENT = 120
"""Most characters of the row about environment variables."""
_TASKS = 4
"""Names of tasks in the row about them."""
_FITS = {"green": "fits", "amber": "may not fit", "red": "does not fit"}


KINDS = {"chat": "conversation", "instruct": "answered prompt", "preference": "preference"}
"""What a plan calls the samples of each kind of records."""


def verdict(plan: Plan) -> str:
    """Return a plan in one sentence: what blocks it, whether it fits, time of a step and of the training, its cost."""
    time, memory, totals = plan.prediction.time, plan.prediction.memory, plan.prediction.totals
    first = plan.prediction.first_run_slowdown
    parts = [
        *([] if plan.runnable else [f"cannot be launched ({', '.join(plan.not_runnable)})"]),
        f"{_FITS[memory.verdict]} ({probability(memory.fit_probability)} sure)",
        f"{seconds(time.step_time_s)} per step{' tuned' if first else ''} {bars(plan.prediction)}",
        *([f"{seconds(plan.prediction.first_run_step_s)} as most first runs"] if first else []),
        "in all as long as the tasks' requests take"
        if plan.judges_by_tasks
        else f"{plan.at_most if plan.training.early_stop is not None else ''}{duration(time.total_s)} in all",
    ]
    if plan.judges_by_tasks:
        return ", ".join(parts)
    if totals is not None and totals.cost is not None:
        parts.append(f"costs {_price(totals.cost)}")
    return ", ".join(parts)


def job_rows(plan: Plan) -> Iterator[Row]:
    """Yield what is trained, on what, with which data and settings."""
    training, totals = plan.training, plan.prediction.totals
    ahead = plan.model.predictions
    further = f", predicts {ahead} further token{'s' * (ahead > 1)}" if ahead else ""
    size = amount(count(parameters(plan.model)))
    yield "Model", f"{size} parameters ({plan.model_source}), {training.precision}{further}"
    if plan.adapter is not None:
        yield "Adapter", _adapter(plan, plan.adapter)
    yield "Machines", _machines(plan)
    tokens = training.steps * training.global_batch * training.sequence_length
    sizes = (
        counted(training.steps, "step"),
        counted(training.global_batch, "sequence"),
        counted(training.sequence_length, "token"),
    )
    job = JOBS[plan.job]
    if plan.judges_by_tasks:
        yield job.title.capitalize(), _tasks(plan)
    else:
        yield job.title.capitalize(), f"{plan.at_most}{' × '.join(sizes)} = {amount(tokens)} tokens"
        yield "Data", _data(plan, totals)
    if plan.data.validation_sets or plan.training.validation.prompts:
        yield "Validation", _validation(plan, totals)
    if not job.backward:
        yield "Stop", stop_text(plan)
        return
    if training.objective.has_reference:
        yield "Reference", _reference(plan, totals)
    if plan.teacher is not None:
        yield "Teacher", _teacher(plan, plan.teacher)
    yield "Optimizer", _optimizer(plan)
    if plan.stopping is not None:
        yield "Checkpoint", _checkpoint(plan, totals)
        yield "Stop", stop_text(plan)


def _tasks(plan: Plan) -> str:
    """Return the tasks, and how many of their requests a step takes."""
    names = [Path(task).stem if is_file(task) else task for task in plan.evaluation.tasks]
    shown = ", ".join(names[:_TASKS]) + (f" and {len(names) - _TASKS} more" if len(names) > _TASKS else "")
    batch, length = plan.training.global_batch, plan.training.sequence_length
    return f"tasks {shown}; a step takes {batch:,} requests of at most {length:,} tokens, and a run counts them"


def _adapter(plan: Plan, adapter: AdapterSpec) -> str:
    """Return what is trained, and how much of the model."""
    infos = parameters(plan.model)
    trained = [info for info in infos if not is_frozen(info.name, plan.priced_frozen)]
    beside = f" and {', '.join(adapter.train)}" if adapter.train else ""
    share = count(trained) / count(infos)
    where = "all projections" if adapter.targets == "all-linear" else ", ".join(adapter.targets)
    return (
        f"{adapter.kind}, rank {adapter.rank}, scale {adapter.scale:g}, on {where}{beside}: "
        f"{amount(count(trained))} parameters trained ({100 * share:.2g}%), the others frozen in {_stored_as(plan)}"
    )


def _stored_as(plan: Plan) -> str:
    """Return the type of frozen weights; with matrices in few bits, their bytes, too."""
    wide, adapter = "bf16" if plan.training.precision == "fp8" else plan.training.precision, plan.model.adapter
    if adapter is None or adapter.base == "bf16":
        return wide
    names = quantised_names(plan.model, plan.frozen)
    infos = [info for info in parameters(plan.model) if info.name in names]
    stored = sum(stored_bytes(adapter, info.shape) for info in infos)
    bits = 8 * stored / max(count(infos), 1)
    return f"{wide}, but for projections in {adapter.base}: {bits:.3g} bits each, {gib(stored)} GiB in all"


def machines(plan: Plan) -> str:
    """Return the plan's devices as text: ``2 nodes × 8 h200 = 16 devices``."""
    devices = plan.devices
    unit = f"rank{'s' * (devices.per_node > 1)} on the CPU" if devices.backend == "cpu" else devices.accelerator
    unit += f", slice {devices.slice}" if devices.slice else ""
    together = f" = {plan.layout.mesh.world_size:,} devices" if devices.nodes > 1 else ""
    return f"{counted(devices.nodes, 'node')} × {devices.per_node} {unit}{together}"


def _machines(plan: Plan) -> str:
    hours, totals = plan.prediction.time.device_hours, plan.prediction.totals
    price = totals and totals.price_per_device_hour
    cost = f" at {_price(price)} each" if price else ""
    return f"{machines(plan)}; {hours_text(hours)} device-hours{cost}"


def hours_text(hours: float) -> str:
    """Return a number of device-hours as text."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _price(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def _written(data: Any) -> list[Any]:
    """Return the sources that a spec's data section names."""
    if not isinstance(data, dict):
        return [data] if data else []
    return [each["source"] for each in data.get("mix", ())] or [data.get("source", [])]


def _names(source: Any) -> list[str]:
    return [str(each) for each in source] if isinstance(source, list) else [str(source)]


def data_name(plan: Plan) -> str:
    """Return the first source of the plan's data, shortened, and the number of further ones."""
    written = plan.spec.get("data")
    sources = [name for part in _written(written) or [plan.data.source] for name in _names(part)] or ["no data"]
    name = sources[0] if len(sources[0]) <= _SOURCE else f"…{sources[0][1 - _SOURCE :]}"
    return name + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")


def _data(plan: Plan, totals: Totals | None) -> str:
    name = data_name(plan)
    if totals is None:
        return name
    if totals.data_tokens is None:
        kind = "" if plan.data.is_text else f"{KINDS[plan.data.records]}s, "
        return f"{name}: {kind}number of tokens unknown ({totals.data_unknown})"
    if not JOBS[plan.job].backward:
        if plan.data.validation_sets:
            return f"{amount(totals.data_tokens)} tokens of {counted(plan.data.validations, 'set')}, each once"
        part = f"{100 * plan.data.validation:.3g}% of them held out" if plan.data.validation else "all"
        if totals.trained_tokens < totals.data_tokens:
            return f"{name}: {amount(totals.trained_tokens)} of {amount(totals.data_tokens)} tokens, evenly spaced"
        return f"{name}: {amount(totals.data_tokens)} tokens ({part}), each once"
    text = f"{name}: {amount(totals.data_tokens)} tokens"
    if totals.data_samples and totals.data_rows:
        text = (
            f"{name}: {counted(totals.data_samples, KINDS[plan.data.records])} of {amount(totals.data_tokens)} tokens"
        )
        filled = totals.data_tokens / (totals.data_rows * plan.training.sequence_length)
        text += f" in {counted(totals.data_rows, 'sequence')}, {min(filled, 1.0):.0%} full"
    text += f", and {100 * plan.data.validation:.3g}% held out" if plan.data.validation else ""
    text += f", validated on {_names(plan.spec['data']['validation_source'])[0]}" if plan.data.validation_source else ""
    if totals.epochs is None:
        return f"{text}; epochs unknown (pack: false trains on one document per sequence)"
    return f"{text}; {totals.epochs:.3g} epochs"


def _validation(plan: Plan, totals: Totals | None) -> str:
    """Return what is validated beside the data without a name, how often, and how long that takes."""
    validation = plan.training.validation
    listed = [f"{name} ({KINDS.get(part.records, 'text')}s)" for name, part in plan.data.named.items()]
    text = f"sets {', '.join(listed)}" if listed else "the data held out"
    if not JOBS[plan.job].backward:
        return text
    text += f"; at most {counted(validation.samples, 'sequence')} of each"
    if validation.prompts:
        text += f", {counted(len(validation.prompts), 'prompt')} continued by up to {validation.new_tokens} tokens"
    text += f" every {counted(validation.every, 'step')}" if validation.every else " at the end"
    if totals is not None and totals.validation_s is not None:
        text += f", about {seconds(totals.validation_s)} each time, which no step's time has"
    return text


def _reference(plan: Plan, totals: Totals | None) -> str:
    """Return what the model is compared with, and what that costs."""
    kind = plan.training.objective.reference
    if kind == "adapter_off":
        return "the model without its adapter: one more forward pass in every step"
    if kind == "copy":
        return "a frozen copy of the first weights, which every rank holds: one more forward pass in every step"
    if totals is None or totals.reference_s is None:
        return "kept before step 1"
    kept = f", {size(totals.reference_bytes)} on disk" if totals.reference_bytes else ""
    return f"kept before step 1: one forward pass over the data, {duration(totals.reference_s)}{kept}"


def _teacher(plan: Plan, teacher: TeacherModel) -> str:
    """Return what teaches the model, for how long, and how much its predictions count."""
    distill, steps = plan.training.distill, plan.training.steps
    assert distill is not None, "a teacher comes with its settings"
    taught = distill.taught_steps(steps)
    how_long = "in all steps" if taught == steps else f"in the first {taught:,} of {steps:,} steps"
    where = Path(teacher.weights.path).name if teacher.weights.path else teacher.weights.source
    size = amount(count(parameters(teacher.model)))
    return f"{where}, {size} parameters, {how_long}; KL × {distill.weight:g} at temperature {distill.temperature:g}"


def _optimizer(plan: Plan) -> str:
    optimizer, steps = plan.optimizer, plan.training.steps
    schedule = optimizer.schedule
    end = f"to {schedule.min_ratio:.0%}"
    course = {
        "constant": "constant",
        "cosine": f"cosine {end}",
        "linear": f"linear {end}",
        "wsd": f"constant, {end} in the last {schedule.decay_steps or math.ceil(steps / 5):,} steps",
    }[schedule.kind]
    warm = counted(schedule.warmup_steps, "warm-up step") if schedule.warmup_steps else "no warm-up"
    groups = f"; {counted(len(optimizer.groups), 'group')} of parameters" if optimizer.groups else ""
    return f"{optimizer.name}, learning rate {optimizer.lr:g}, {warm}, then {course}{groups}"


def _checkpoint(plan: Plan, totals: Totals | None) -> str:
    text = saves_text(plan)
    return text if totals is None else f"{size(totals.checkpoint_bytes)} each, {text}"


def layout_rows(plan: Plan) -> Iterator[Row]:
    """Yield the layout, and where the memory and the time of a step go."""
    yield "Layout", "; ".join(_layout(plan))
    yield "Memory", _memory(plan)
    if host := _host(plan):
        yield "Host", host
    yield "Time", _time(plan)
    if variables := environment.summary(plan):
        short = len(variables) <= _ENVIRONMENT
        yield "Variables", variables if short else f"{variables[:_ENVIRONMENT]}… (--show environment)"


def division(plan: Plan) -> Iterator[str]:
    """Yield how the layout divides the work: degrees, ZeRO stage, micro-batches, schedule, sequences."""
    layout, mesh = plan.layout, plan.layout.mesh
    yield _axes(plan)
    sharing = mesh.dp_shard * mesh.cp
    shard = f", state shared by {sharing}" if layout.data.zero and sharing > 1 else ""
    copies = f", {mesh.dp_replicate} copies" if layout.data.zero and mesh.dp_replicate > 1 else ""
    yield f"ZeRO-{layout.data.zero}{shard}{copies}"
    yield f"micro-batch {layout.micro_batch} × {layout.derived.accumulation} per step"
    if mesh.pp > 1:
        yield f"schedule {layout.pipeline.form}, {_stage_sizes(plan)} per stage"
    if mesh.cp > 1:
        yield f"sequences by {layout.sequence.form}, {layout.sequence.order}"


def _layout(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    yield from division(plan)
    yield f"recompute {_recompute(layout.recompute)}"
    yield f"compile {layout.compile}"
    for what, tokens in (("networks", layout.tiles.mlp), ("loss", layout.tiles.loss)):
        if tokens:
            yield f"{what} in tiles of {tokens:,} tokens"
    yield from _offloaded(plan)


def _axes(plan: Plan) -> str:
    """Return the degrees of parallelism as text, outermost first: ``pipeline 2 × data 2 × tensor 4``."""
    mesh = plan.layout.mesh
    sizes = (("pipeline", mesh.pp), ("data", mesh.dp), ("sequence", mesh.cp), ("tensor", mesh.tp))
    parts = [f"{name} {degree}" for name, degree in sizes if degree > 1]
    text = " × ".join(parts) if parts else "one rank"
    return text + (f", experts over {plan.layout.expert_ranks}" if plan.layout.expert > 1 else "")


def _stage_sizes(plan: Plan) -> str:
    sizes = sorted({stop - start for start, stop in plan.layout.pipeline.bounds})
    text = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    return f"{text} layer{'s' * (sizes[-1] > 1)}"


def _recompute(policies: tuple[str, ...]) -> str:
    kinds = list(dict.fromkeys(policies))
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{kind} × {policies.count(kind)}" for kind in kinds)


def _offloaded(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if layout.offload.optimizer != "none":
        yield f"{1.0 - layout.offload.gpu_fraction:.0%} of the optimizer {_IN[layout.offload.optimizer]}"
    if layout.offload.parameters != "none":
        yield f"parameters {_IN[layout.offload.parameters]}"
    if layout.offload.activations == "cpu":
        yield "activations in host memory"


def _memory(plan: Plan) -> str:
    memory, device = plan.prediction.memory, plan.devices.memory_bytes
    share = memory.total_bytes / device
    what = "rank" if plan.devices.backend == "cpu" else "device"
    parts = _largest(in_order(memory.terms_bytes, MEMORY_TERMS), gib)
    return f"{gib(memory.total_bytes)} of {gib(device)} GiB per {what} ({share:.0%}): {parts}"


def host_bytes(plan: Plan) -> int:
    """Return the host memory that all ranks of a node take; 0 if there is none, or no figure of it."""
    chosen = next((row.host_bytes for row in plan.candidates if not row.why_not), 0)
    return plan.prediction.memory.host_bytes or chosen


def _host(plan: Plan) -> str:
    """Return the host memory that all ranks of a node take; empty if there is none, or no figure of it."""
    memory, host = plan.prediction.memory, plan.devices.host_memory_bytes
    total = host_bytes(plan)
    if not total or not host:
        return ""
    parts = _largest(in_order(memory.host_terms_bytes, ()), gib)
    return f"{gib(total)} of {gib(host)} GiB per node ({total / host:.0%})" + (f"; per rank: {parts}" if parts else "")


def _time(plan: Plan) -> str:
    time = plan.prediction.time
    speed = f"{amount(time.tokens_per_s)} tokens/s" + (f", MFU {time.mfu:.1%}" if time.mfu is not None else "")
    return f"{speed}; per step: {_largest(in_order(time.terms_s, TIME_TERMS), seconds)}"


def _largest(terms: Iterable[tuple[str, float]], show: Callable[[float], str]) -> str:
    """Return the largest terms, largest first, and the sum of the others."""
    ordered = sorted(terms, key=lambda term: -term[1])
    total = sum(value for _, value in ordered)
    named = [term for term in ordered[:_NAMED] if term[1] >= _SHOWN * total]
    parts = [f"{name} {show(value)}" for name, value in named]
    rest = total - sum(value for _, value in named)
    return ", ".join([*parts, *([f"all else {show(rest)}"] if rest > 0 and len(ordered) > len(named) else [])])


def stop_text(plan: Plan) -> str:
    """Return the time that a stop request leaves the run and what it needs; empty for other training systems."""
    if plan.stopping is None:
        return ""
    given_s, needed_s = plan.launch.window_s, plan.stopping.needed_s
    enough = "" if given_s >= needed_s else f", and may take {needed_s} s"
    if not JOBS[plan.job].backward:
        return f"within {given_s} s{enough}; a stopped {JOBS[plan.job].title} goes on where it was"
    sooner = f"a shorter notice (spot) loses {worst_loss(plan.checkpoint.every)}"
    return f"within {given_s} s{enough}: {in_words(plan, plan.stopping)}; {sooner}"


def saves_text(plan: Plan) -> str:
    """Return when the run writes checkpoints, and the reason where partool has decided it."""
    every, keep = plan.checkpoint.every, plan.checkpoint.keep
    written = plan.spec.get("checkpoint", {})
    asked = isinstance(written, dict) and written.get("every", "auto") != "auto"
    if every in (0, "auto"):
        text = "at the end only"
    else:
        text = f"every {every}" if isinstance(every, str) else f"every {every:,} steps"
        text += f", the last {keep} kept" if keep > 1 else ""
    if (best := plan.checkpoint.best) is not None:
        text += f", and the best{f' {best.keep}' if best.keep > 1 else ''} by {best.metric}"
    if asked or plan.stopping is None:
        return text
    return f"{text} (auto: {'up to' if every == 0 else 'over'} {LONG_RUN_S / 3600:g} h)"
