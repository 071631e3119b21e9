"""Rules that need only the spec; :mod:`partool.planner.rules` has the rules that need the model or the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from partool.diagnostics.record import Diagnostic
from partool.spec._launch_env import secrets_in
from partool.spec.evaluation_checks import check_evaluation
from partool.spec.expert_checks import check_experts
from partool.spec.judging_checks import check_judged
from partool.spec.launch_checks import ERRORS, LaunchRule
from partool.spec.model import LayerPattern
from partool.spec.numbers import duration_s
from partool.spec.offload_checks import check_offload
from partool.spec.pipeline_checks import check_pipeline
from partool.spec.prompt_checks import check_prompts
from partool.spec.sequence_checks import check_sequence
from partool.spec.spec import Spec
from partool.spec.telemetry_checks import check_trackers
from partool.spec.training import OptimizerGroup, OptimizerName, OptimizerSpec
from partool.spec.watched import independent
from partool.strategies.jobs import JOBS
from partool.strategies.optimizers import OPTIMIZERS
from partool.strategies.schedules import MOVING_WEIGHTS
from partool.strategies.targets import TARGETS

_ATTENTION = ("model", "attention")


def check_grid(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for row or column layers without a grid, a grid without such layers, or a grid of the wrong size."""
    attention = spec.model.attention
    if attention is None:
        return
    types = attention.layer_types
    kinds = set((types.pattern if isinstance(types, LayerPattern) else types) or ())
    along = sorted(kinds & {"row", "column"})
    length = spec.training.sequence_length
    if attention.grid is None:
        if along:
            message = f"{' and '.join(along)} layers attend along the axes of a grid, but none is given"
            columns = next(n for n in range(int(length**0.5), 0, -1) if length % n == 0)
            help = f"add grid: [{length // columns}, {columns}], say: rows and columns of a sequence's tokens"
            yield Diagnostic("PT475", message, path=(*_ATTENTION, "layer_types"), help=help)
        return
    rows, columns = attention.grid
    if not along:
        message = f"the tokens lie on a grid of {rows} × {columns}, but no layer attends along its rows or columns"
        help = "add layer_types: {pattern: [row, column]}, or drop the grid"
        yield Diagnostic("PT476", message, path=(*_ATTENTION, "grid"), help=help)
    if rows * columns != length:
        message = f"a grid of {rows} × {columns} holds {rows * columns} tokens, a sequence has {length}"
        help = f"use sequence_length: {rows * columns}"
        yield Diagnostic("PT477", message, path=("training", "sequence_length"), help=help)


if TYPE_CHECKING:
    from partool.spec.spec import Spec

Path = tuple[str | int, ...]
_SETTINGS = ("betas", "momentum", "eps", "newton_schulz", "one_bit", "adapt", "norm_bounds")
"""Settings that not every optimizer reads."""


def check_optimizer(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for betas out of range, and findings about settings that the optimizer does not read."""
    optimizer = spec.optimizer
    if spec.model.by_others and OPTIMIZERS[optimizer.name].rest:
        message = f"{optimizer.name} knows the matrices of partool's own decoder, and other code builds this model"
        help = "use adamw, or give the model's configuration as model.config, which partool's decoder reads"
        yield Diagnostic("PT241", message, path=("optimizer", "name"), help=help)
    if OPTIMIZERS[optimizer.name].whole_steps:
        yield from _one_bit(spec)
    if optimizer.norm_bounds is not None and optimizer.norm_bounds[0] > optimizer.norm_bounds[1]:
        low, high = optimizer.norm_bounds
        message = f"the lowest norm, {low:g}, is larger than the highest, {high:g}"
        yield Diagnostic("PT244", message, path=("optimizer", "norm_bounds"), help=f"use [{high:g}, {low:g}]")
    yield from _settings(optimizer.name, optimizer, ("optimizer",))
    for pattern, group in optimizer.groups.items():
        yield from _settings(optimizer.name, group, ("optimizer", "groups", pattern))


def _one_bit(spec: Spec) -> Iterator[Diagnostic]:
    """Yield an error for each choice that is not built for ranks that keep whole, differing copies of the weights."""
    name, parallel = spec.optimizer.name, spec.parallel
    sequence, schedule = parallel.sequence, parallel.pipeline.schedule
    choices = (
        (
            parallel.data.zero not in ("auto", 0),
            ("parallel", "data", "zero"),
            f"zero: {parallel.data.zero} shards state that every rank of {name} needs between exchanges",
            "set zero: 0; the errors of averages are shared out in any case",
        ),
        (
            sequence.degree not in ("auto", 1) or sequence.method != "auto",
            ("parallel", "sequence"),
            f"ranks that share sequences need equal weights in every step, those of {name} differ between exchanges",
            "drop the sequence section, or use adamw",
        ),
        (
            schedule in MOVING_WEIGHTS,
            ("parallel", "pipeline", "schedule"),
            f"{schedule} sums gradients as it sends weights around, and {name} sums those of few steps",
            "use 1f1b, or adamw",
        ),
        (
            spec.model.moe is not None,
            ("optimizer", "name"),
            f"the experts of a layer are balanced by the loads of all ranks in every step, which {name} does not send",
            "use adamw",
        ),
    )
    for wrong, path, message, help in choices:
        if wrong:
            yield Diagnostic("PT242", message, path=path, help=help)


def _settings(name: OptimizerName, settings: OptimizerSpec | OptimizerGroup, path: Path) -> Iterator[Diagnostic]:
    yield from _betas(settings.betas, (*path, "betas"))
    yield from _unread(name, settings, path)


def _betas(betas: list[float] | None, path: Path) -> Iterator[Diagnostic]:
    for index, beta in enumerate(betas or ()):
        if not 0.0 <= beta < 1.0:
            message = f"betas[{index}] is {beta}, and must lie in [0, 1)"
            yield Diagnostic("PT216", message, path=(*path, index), help="the usual pair is [0.9, 0.95]")


def _unread(name: OptimizerName, settings: OptimizerSpec | OptimizerGroup, path: Path) -> Iterator[Diagnostic]:
    for setting in _SETTINGS:
        field = type(settings).model_fields.get(setting)
        if field is None:
            continue
        if setting not in OPTIMIZERS[name].reads and getattr(settings, setting) != field.default:
            reads = " and ".join(OPTIMIZERS[name].reads)
            readers = " or ".join(other for other, record in OPTIMIZERS.items() if setting in record.reads)
            message = f"{setting} is a setting of {readers}; {name} reads {reads}"
            yield Diagnostic("PT226", message, path=(*path, setting), help=f"drop {setting}, or set {reads}")


Check = Callable[[Spec], Iterator[Diagnostic]]


def check(spec: Spec) -> list[Diagnostic]:
    """Return the findings of all rules that need only the spec."""
    return [finding for rule in CHECKS for finding in independent(rule, spec)]


def _secrets(section: str) -> Check:
    """Return a rule that looks for secrets in a section of the spec."""
    return lambda spec: secrets_in(getattr(spec, section), (section,))


def _one_model_source(spec: Spec) -> Iterator[Diagnostic]:
    names = {
        "preset": "a preset", "config": "a configuration file", "hf": "a folder of transformers",
        "module": "a module of yours",
    }  # fmt: skip
    given = [name for name in names if getattr(spec.model, name)]
    if isinstance(spec.model.config, dict):
        given = [name for name in given if name != "config"]
        if spec.model.module is None:
            help = "write module: package.module:Class beside it, or give config as the path of a file"
            yield Diagnostic("PT201", "config holds keywords, but no module", path=("model", "config"), help=help)
    if len(given) > 1:
        message = f"the model is given twice: by {names[given[0]]} and by {names[given[1]]}"
        yield Diagnostic("PT201", message, path=("model", given[1]), help="keep one; fields beside it override it")


def _model_fields(spec: Spec) -> Iterator[Diagnostic]:
    model = spec.model
    if model.preset or model.config or model.hf or model.module:
        return
    missing = [name for name in ("layers", "hidden", "heads") if getattr(model, name) is None]
    if missing:
        message = f"the model is not complete: {', '.join(missing)} missing, and no preset or config given"
        yield Diagnostic("PT202", message, path=("model",), help="add them, or start from a preset such as llama3-8b")


def _kv_heads(spec: Spec) -> Iterator[Diagnostic]:
    heads, kv_heads = spec.model.heads, spec.model.kv_heads
    if heads and kv_heads and heads % kv_heads:
        legal = [n for n in range(1, heads + 1) if heads % n == 0]
        message = f"{heads} attention heads cannot share {kv_heads} key and value heads evenly"
        help = f"kv_heads can be {_listed(legal)}"
        yield Diagnostic("PT204", message, path=("model", "kv_heads"), help=help)


def _head_dim(spec: Spec) -> Iterator[Diagnostic]:
    model = spec.model
    if model.mla is not None:
        return
    if model.head_dim is None and model.hidden and model.heads and model.hidden % model.heads:
        down = model.hidden - model.hidden % model.heads
        message = f"hidden: {model.hidden} is not a multiple of heads: {model.heads}"
        help = f"use hidden: {down or model.heads} or {down + model.heads}, or give head_dim"
        yield Diagnostic("PT205", message, path=("model", "hidden"), help=help)
    if model.head_dim and model.head_dim % 2 and (model.position or "rope") == "rope":
        message = f"head_dim: {model.head_dim} is odd, and rotary positions turn pairs of dimensions"
        yield Diagnostic(
            "PT206", message, path=("model", "head_dim"), help=f"use {model.head_dim + 1}, or position: none"
        )


def _rope_scaling(spec: Spec) -> Iterator[Diagnostic]:
    scaling = spec.model.rope_scaling
    if scaling is None:
        return
    for name in scaling.unread:
        message = f"rope_scaling of kind {scaling.kind} does not read {name}"
        help = "drop it, or change the kind"
        yield Diagnostic("PT238", message, path=("model", "rope_scaling", name), help=help)


def _window(spec: Spec) -> Iterator[Diagnostic]:
    attention = spec.model.attention
    if attention is None:
        return
    types = attention.layer_types
    kinds = types.pattern if isinstance(types, LayerPattern) else types
    if kinds and "sliding" in kinds and attention.window is None:
        message = "sliding layers need the length of their window"
        yield Diagnostic("PT207", message, path=("model", "attention"), help="add window: 4096, say")
    if attention.window and kinds and "sliding" not in kinds:
        message = f"window: {attention.window} is given, but no layer is sliding"
        path = ("model", "attention", "window")
        yield Diagnostic("PT208", message, path=path, help="add sliding layers to layer_types, or drop the window")
    if isinstance(types, list) and spec.model.layers and len(types) != spec.model.layers:
        message = f"layer_types names {len(types)} layers, the model has {spec.model.layers}"
        path = ("model", "attention", "layer_types")
        yield Diagnostic("PT209", message, path=path, help="name every layer, or write {pattern: [...]}")


def _weights(spec: Spec) -> Iterator[Diagnostic]:
    weights = spec.model.weights
    in_model_folder = weights.source == "hf" and spec.model.hf is not None  # the model's own folder
    if weights.source in ("checkpoint", "hf") and weights.path is None and not in_model_folder:
        message = f"weights from {weights.source} need a path"
        yield Diagnostic("PT211", message, path=("model", "weights"), help="add path: FOLDER")
    if weights.source in ("init", "dummy") and weights.path is not None:
        message = f"weights: {weights.source} reads no files, but a path is given"
        path = ("model", "weights", "path")
        yield Diagnostic("PT212", message, path=path, help="set source: hf or checkpoint, or drop the path")
    if weights.upcycle and (weights.source not in ("checkpoint", "hf") or spec.model.by_others):
        message = "upcycle: true copies the networks of a dense model, from a checkpoint or from a Hugging Face folder"
        help = "write source, path and upcycle: true beside the fields of a model of partool's own, or drop upcycle"
        yield Diagnostic("PT229", message, path=("model", "weights", "upcycle"), help=help)


def _length(spec: Spec) -> Iterator[Diagnostic]:
    """Yield an error where a training has two lengths."""
    given = [name for name in ("steps", "epochs", "tokens") if name in spec.training.model_fields_set]
    given = [name for name in given if getattr(spec.training, name) is not None]
    if len(given) > 1:
        message = f"{' and '.join(given)} each say how long the training is"
        yield Diagnostic("PT243", message, path=("training", given[1]), help=f"keep one, such as {given[1]}")


def check_steps(spec: Spec) -> Iterator[Diagnostic]:
    """Yield findings that depend on the number of steps; epochs and tokens must have been turned into steps."""
    yield from _schedule(spec)
    yield from _restarts(spec)


def _steps(spec: Spec) -> Iterator[Diagnostic]:
    """Yield the findings of :func:`check_steps` where the spec gives the number of steps."""
    if not spec.training.counts_later:
        yield from check_steps(spec)


def _schedule(spec: Spec) -> Iterator[Diagnostic]:
    schedule, path = spec.optimizer.schedule, ("optimizer", "schedule")
    if schedule.warmup_steps and schedule.warmup_ratio is not None:
        message = "warmup_steps and warmup_ratio each say how long the warm-up is"
        yield Diagnostic("PT243", message, path=(*path, "warmup_ratio"), help="keep one of them")
    if schedule.decay_steps is not None and schedule.kind != "wsd":
        message = f"decay_steps belongs to the schedule wsd, not to {schedule.kind}"
        yield Diagnostic("PT214", message, path=(*path, "decay_steps"), help="set kind: wsd, or drop it")
    steps = spec.training.steps
    if schedule.warmup_steps > steps:
        message = f"warm-up takes {schedule.warmup_steps} steps, training has {steps}"
        yield Diagnostic("PT213", message, path=(*path, "warmup_steps"), help=f"use at most {max(steps // 10, 1)}, say")
    if schedule.kind == "wsd" and schedule.warmup_steps + (schedule.decay_steps or 0) > steps:
        message = f"warm-up and decay take {schedule.warmup_steps} + {schedule.decay_steps} of {steps} steps"
        help = f"decay_steps can be at most {max(steps - schedule.warmup_steps, 1)}"
        yield Diagnostic("PT215", message, path=(*path, "decay_steps"), help=help)


def _duration(spec: Spec) -> Iterator[Diagnostic]:
    every = spec.checkpoint.every
    if isinstance(every, str) and every != "auto" and duration_s(every) is None:
        message = f"{every!r} is neither a number of steps nor a duration"
        path = ("checkpoint", "every")
        yield Diagnostic("PT217", message, path=path, help="write 500 for steps, 90s, 30min, 2h, or auto")


def _restarts(spec: Spec) -> Iterator[Diagnostic]:
    """Warn of starts after a failure or a preemption that find no checkpoint, as the spec asks for none."""
    launch, every, steps = spec.launch, spec.checkpoint.every, spec.training.steps
    target = TARGETS[launch.target]
    if target.starter == "by hand" or not isinstance(every, int) or 0 < every < steps:  # restarts nothing, or saves
        return
    path: Path = ("launch", "restarts")
    if launch.restarts:
        message = f"restarts: {launch.restarts}, but no checkpoint before the end: a restart begins at step 0"
    elif not target.comes_back and launch.requeues:
        message = (
            f"requeues: {launch.requeues}, but no checkpoint before the end: a job whose node fails begins at step 0"
        )
        path = ("launch", "requeues") if "requeues" in launch.model_fields_set else ("checkpoint", "every")
    elif target.starter == "scheduler" and target.comes_back:
        message = f"a lost pod comes back {target.comes_back}, but no checkpoint before the end: it begins at step 0"
        path = ("checkpoint", "every")
    else:
        return
    help = f"use checkpoint: {{every: {min(500, max(steps // 10, 1))}}} (steps), {{every: 30min}} or {{every: auto}}"
    yield Diagnostic("PT227", message, "warning", path, help=help)


def _validation(spec: Spec) -> Iterator[Diagnostic]:
    if spec.training.validation.every > 0 and not spec.data.validates:
        message = "validation is asked for, but no data is held out for it"
        path = ("training", "validation")
        yield Diagnostic("PT218", message, path=path, help="set data.validation, such as 0.01")


def _sharding(spec: Spec) -> Iterator[Diagnostic]:
    data = spec.parallel.data
    if data.zero == 0 and data.shard not in ("auto", 1):
        message = f"shard: {data.shard} has no meaning with zero: 0, which replicates everything"
        path = ("parallel", "data", "shard")
        yield Diagnostic("PT219", message, path=path, help="use zero: 1, 2 or 3, or drop shard")


def _sources(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for data that are named nowhere or twice, and for mixtures that say two things."""
    data = spec.data
    reads_none = bool(spec.evaluation.tasks) and not JOBS[spec.job].backward  # tasks have texts of their own
    for source in [each.source for each in data.mix] or [data.source]:
        if (not source and not reads_none) or (isinstance(source, list) and "" in source):
            message = "data.source names no file"
            yield Diagnostic("PT220", message, path=("data",), help="a file, a glob, a folder, or python-stdlib")
    if data.source and data.mix:
        message = "source and mix each name the data"
        yield Diagnostic("PT245", message, path=("data", "mix"), help="make source an entry of mix, or drop one")
    if data.validation and data.validation_source:
        message = "validation and validation_source each say what is held out"
        yield Diagnostic("PT245", message, path=("data", "validation_source"), help="keep one of them")
    weighted = sum(each.weight is not None for each in data.mix)
    if weighted and (weighted < len(data.mix) or any(each.epochs is not None for each in data.mix)):
        message = f"{weighted} of {len(data.mix)} sources of the mixture have a weight"
        help = "give each a weight, or each a number of epochs"
        yield Diagnostic("PT246", message, path=("data", "mix"), help=help)


def _launch(rule: LaunchRule) -> Check:
    """Return a rule about launching as a rule about specs."""
    return lambda spec: rule(spec.launch)


def _listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values[:-1]) + f" or {values[-1]}" if len(values) > 1 else str(values[0])


CHECKS: tuple[Check, ...] = (
    *(_secrets(name) for name in sorted(set(Spec.model_fields) - {"launch"})),  # launch's rules know the site profile
    _one_model_source,
    _model_fields,
    _kv_heads,
    _head_dim,
    _rope_scaling,
    _window,
    check_grid,
    check_experts,
    _weights,
    _length,
    _steps,
    check_optimizer,
    _duration,
    _validation,
    check_judged,
    check_evaluation,
    check_prompts,
    _sharding,
    check_pipeline,
    check_sequence,
    check_offload,
    _sources,
    check_trackers,
    *(_launch(rule) for rule in ERRORS),
)
