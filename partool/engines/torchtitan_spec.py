"""Turns torchtitan's settings into a pinned spec.

Meanings and defaults: ``torchtitan/config/job_config.py`` of 0.1 and 0.2, ``torchtitan/config_manager.py`` before, and
``torchtitan/config/configs.py`` of 2026 (https://github.com/pytorch/torchtitan).
"""

from __future__ import annotations

from partool.catalog.lookup import table
from partool.engines.recipes import of_torchtitan
from partool.engines.sections import OptimizerDict, ParallelDict, SpecDict, TrainingDict
from partool.engines.settings import Sheet
from partool.engines.torchtitan import listed
from partool.engines.torchtitan_layout import parallel_of
from partool.engines.torchtitan_models import flavour

_OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd", "lion": "lion"}
_EIGHT_BITS = ("float8", "quantize.linear.float8", "quantize.dense.float8", "Float8LinearConverter")
_MX = ("mx", "quantize.linear.mx", "quantize.dense.mx", "MXFP8LinearConverter", "MXLinearConverter", "MXConverter")
_EXPERTS_ONLY = (
    "quantize.grouped_mm.float8", "quantize.grouped_mm.mx", "quantize.moe.float8", "quantize.moe.mx",
    "Float8GroupedMMConverter", "MXFP8GroupedMMConverter",
)  # fmt: skip
_LARGE = {"output", "lm_head", "router.gate", "router", "auto_filter_small_kn"}
"""Modules whose products are few or small, and that are commonly left in 16 bits."""


def era_of(sheet: Sheet) -> int:
    """Return 1 for names before the section ``parallelism`` (0.0), 2 for ``training.batch_size`` (0.1), 3 for others.

    4 is for the functions of 2026.
    """
    if any(setting.file.endswith(".py") for setting in sheet.settings.values()):
        return 4
    names = {setting.name for setting in sheet.settings.values()}
    if any(
        name.startswith(("training.data_parallel", "training.tensor_p", "experimental.pipeline_")) for name in names
    ):
        return 1
    return 2 if "training.batch_size" in names else 3


def spec_of(sheet: Sheet, world: int | None) -> SpecDict:
    """Return the sections ``model``, ``training``, ``parallel`` and ``optimizer``; ``world`` is the number of ranks."""
    era = era_of(sheet)
    model = _model(sheet, era)
    fields = model_fields(model)
    layers = fields.get("layers")
    compiled = _compiled(sheet)
    parallel, ranks = parallel_of(
        sheet, world, era, layers if isinstance(layers, int) else 0, experts="moe" in fields, compiled=compiled
    )
    training = _training(sheet, parallel, ranks)
    optimizer: OptimizerDict = {"name": _optimizer(sheet), **of_torchtitan(sheet, training["steps"])}
    spec: SpecDict = {"training": training, "parallel": parallel, "optimizer": optimizer}
    _left_out(sheet)
    if model:
        spec["model"] = model
    return spec


def model_fields(model: dict[str, object] | None) -> dict[str, object]:
    """Return the fields of a model, whose preset is looked up; nothing for None."""
    if model is None:
        return {}
    preset = table("models").get(str(model.get("preset")), {})
    return {**preset.get("fields", {}), **model}


def _model(sheet: Sheet, era: int) -> dict[str, object] | None:
    name = str(sheet.get("model.name", "llama3", to="model.preset"))
    size = str(sheet.get("model.flavor", "debugmodel", to="model.preset"))
    sizes = flavour(name, size)
    if era < 3 and size.startswith("debugmodel"):
        sizes = None
    if sizes is None:
        what = f"the sizes of {name} {size} are not known here: add --model with a preset or a config.json"
        sheet.lacks("model.preset", what, "model.flavor", "model.name")
        return None
    return {"preset": sizes} if isinstance(sizes, str) else dict(sizes)


def _compiled(sheet: Sheet) -> bool:
    on = sheet.flag("compile.enable", to="parallel.compile")
    parts = listed(sheet.get("compile.components", ["model", "loss"], to="parallel.compile"))
    return on and "model" in parts


def _training(sheet: Sheet, parallel: ParallelDict, ranks: int | None) -> TrainingDict:
    local = sheet.integer("training.local_batch_size", 8, to="training.global_batch")
    batch = sheet.integer("training.global_batch_size", -1, to="training.global_batch", off=(-1,))
    fields: TrainingDict = {
        "sequence_length": sheet.integer("training.seq_len", 2048, to="training.sequence_length"),
        "steps": sheet.integer("training.steps", 10000, to="training.steps"),
        "precision": _precision(sheet),
    }
    if sheet.flag("debug.deterministic", to="training.deterministic"):
        fields["deterministic"] = True
    if batch <= 0 and ranks is None:
        what = "without global_batch_size the batch depends on the number of ranks, which is not known"
        sheet.lacks("training.global_batch", what, "training.local_batch_size")
    elif batch <= 0:
        batch = local * (ranks or 1)
    elif ranks is not None and batch % (local * ranks):
        sheet.say(
            "PT821", "error", f"global_batch_size {batch} is no multiple of local_batch_size {local} · {ranks} "
            "data-parallel ranks", "a multiple, or remove it", "training.global_batch_size",
        )  # fmt: skip
    if batch > 0:
        fields["global_batch"] = batch
    if parallel["pipeline"]["stages"] > 1 and ranks is not None and batch > local * ranks:
        sheet.say(
            "PT824", "note", f"the pipeline runs empty after each local batch of {local}; it is priced as one that "
            "goes on until the step ends", "a larger local_batch_size", "training.global_batch_size",
        )  # fmt: skip
    if sheet.flag("validation.enable", to="training.validation.every"):
        fields["validation"] = _validation(sheet, ranks or 1)
    for name in ("freq", "steps", "local_batch_size", "seq_len"):
        sheet.get(f"validation.{name}", to="training.validation")
    return fields


def _validation(sheet: Sheet, ranks: int) -> dict[str, int]:
    steps = sheet.integer("validation.steps", -1, to="training.validation.samples", off=(-1,), derived=True)
    local = sheet.integer("validation.local_batch_size", 8, to="training.validation.samples")
    every = sheet.integer("validation.freq", 10, to="training.validation.every")
    if steps > 0:
        return {"every": every, "samples": steps * local * ranks}
    sheet.say(
        "PT824", "note", "a validation reads the whole data set, whose size is not known; one batch is priced",
        "--set training.validation.samples=NUMBER", "validation.steps", "validation.enable",
    )  # fmt: skip
    return {"every": every, "samples": local * ranks}


def _precision(sheet: Sheet) -> str:
    if str(sheet.get("training.dtype", "float32", to="training.precision")) != "float32":
        sheet.say(
            "PT823", "error", "training.dtype keeps weights and moments in 16 bits, and partool keeps them in 32",
            "float32, with mixed_precision_param", "training.dtype",
        )  # fmt: skip
    plain = str(sheet.get("training.mixed_precision_param", "bfloat16", to="training.precision"))
    words = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    if plain not in words:
        sheet.say(
            "PT823", "error", f"{plain} has no counterpart here", " or ".join(words), "training.mixed_precision_param"
        )
    converters = listed(sheet.get("model.converters", [], to="training.precision"))
    if sheet.flag("model.enable_float8_linear", to="training.precision"):
        converters.append("float8")
    precision = words.get(plain, "bf16")
    for name in converters:
        precision = _converted(sheet, name, precision)
    if precision == "fp8":
        _eight_bits(sheet)
    for name in _EIGHT_BIT_KEYS:
        sheet.get(name, to="training.precision")
    return precision


_EIGHT_BIT_KEYS = (
    "float8.filter_fqns", "mx.filter_fqns", "float8.enable_fsdp_float8_all_gather", "float8.emulate",
    "float8.moe_fqns_prototype", "mx.moe_fqns_prototype", "quantize.grouped_mm.float8.fqns",
    "quantize.grouped_mm.mx.fqns",
)  # fmt: skip


def _converted(sheet: Sheet, name: str, before: str) -> str:
    """Return the precision after a converter of the model; findings for one without a counterpart."""
    if name in _EIGHT_BITS:
        return "fp8"
    if name in _MX:
        sheet.say(
            "PT824", "note", f"{name} scales blocks of 32; it is priced as 8 bits with one scale", "float8",
            "model.converters",
        )  # fmt: skip
        return "fp8"
    if name in _EXPERTS_ONLY:
        if before != "fp8":
            sheet.say(
                "PT824", "note", f"{name} is for experts only; their products are priced in 16 bits",
                "--set training.precision=fp8 prices all products in 8 bits", "model.converters",
            )  # fmt: skip
        return before
    sheet.say("PT823", "error", f"the converter {name} has no counterpart here", "remove it", "model.converters")
    return before


def _eight_bits(sheet: Sheet) -> None:
    kept = [each for each in listed(sheet.get("float8.filter_fqns", [], to="training.precision")) if each not in _LARGE]
    if kept:
        sheet.say(
            "PT824", "note", f"products of {', '.join(kept)} stay in 16 bits, and all are priced in 8",
            "--set training.precision=bf16 prices none in 8 bits", "float8.filter_fqns",
        )  # fmt: skip
    if sheet.flag("float8.enable_fsdp_float8_all_gather", to="training.precision"):
        sheet.say(
            "PT824", "note", "weights are gathered in 8 bits, and priced as gathered in 16", "no change is needed",
            "float8.enable_fsdp_float8_all_gather",
        )  # fmt: skip
    if sheet.flag("float8.emulate", to="training.precision"):
        sheet.say("PT823", "error", "emulated 8 bits take longer than priced", "remove it", "float8.emulate")


def _optimizer(sheet: Sheet) -> str:
    name = str(sheet.get("optimizer.name", "AdamW", to="optimizer.name"))
    if name.lower() not in _OPTIMIZERS:
        sheet.say("PT823", "error", f"the optimizer {name} is not priced here", "AdamW", "optimizer.name")
    if sheet.flag("optimizer.early_step_in_backward", to="nothing: off"):
        sheet.say(
            "PT823", "error", "updates within the backward pass free gradients early, which is not priced",
            "remove it", "optimizer.early_step_in_backward",
        )  # fmt: skip
    return _OPTIMIZERS.get(name.lower(), "adamw")


def _left_out(sheet: Sheet) -> None:
    """Say what changes the price and has no field."""
    if sheet.flag("fault_tolerance.enable", to="nothing: off"):
        sheet.say("PT823", "error", "replicas that may be lost are not priced", "remove it", "fault_tolerance.enable")
    if str(sheet.get("fault_tolerance.semi_sync_method", "", to="nothing: off") or ""):
        sheet.say(
            "PT823", "error", "replicas that meet every few steps are not priced", "remove it",
            "fault_tolerance.semi_sync_method",
        )  # fmt: skip
    if str(sheet.get("comm.mode", "default", to="nothing: default")) not in ("default", "torchcomms"):
        sheet.say("PT823", "error", "such communication is for tests, and not priced", "default", "comm.mode")
    if sheet.flag("debug.detect_anomaly", to="nothing: off"):
        sheet.say(
            "PT823", "error", "the search for NaN takes time that is not priced", "remove it", "debug.detect_anomaly"
        )
    for name in ("experimental.custom_import", "experimental.custom_args_module", "experimental.custom_model_path"):
        if str(sheet.get(name, "", to="nothing: code that is not read") or ""):
            sheet.say("PT824", "note", f"the code that {name} names is not read", "no change is needed", name)
