"""Turns accelerate's settings and ``TrainingArguments`` into a pinned spec.

Meanings and defaults: accelerate 1.10 (``accelerate/utils/dataclasses.py``, ``accelerate/parallelism_config.py``;
https://github.com/huggingface/accelerate) and transformers 4.57 (``transformers/training_args.py``, ``trainer.py``;
https://github.com/huggingface/transformers). With DeepSpeed or Megatron-LM below, the spec is for that engine.
"""

from __future__ import annotations

import re

from partool.catalog.lookup import table
from partool.engines import accelerate_deepspeed, adapters
from partool.engines.accelerate_deepspeed import of_launcher
from partool.engines.accelerate_files import OF
from partool.engines.accelerate_keys import NO_EFFECT
from partool.engines.accelerate_layout import parallel_of
from partool.engines.machines import Machines, Stated
from partool.engines.recipes import of_trainer
from partool.engines.sections import SpecDict, TrainingDict
from partool.engines.settings import Sheet

_LENGTHS = (
    "max_seq_length", "max_seq_len", "max_length", "model_max_length", "cutoff_len", "block_size", "sequence_len",
    "max_source_length",
)  # fmt: skip


def machines_of(sheet: Sheet, machines: Machines) -> None:
    """Add what accelerate's configuration or options say; torchrun's options count over them."""
    nodes = sheet.integer(OF + "num_machines", to="hardware.nodes")
    if nodes and "nodes" not in machines.launcher:
        machines.option(sheet.settings[OF + "num_machines"], "nodes")
    if any(name.startswith(OF) for name in sheet.settings):
        machines.default("nodes", 1, "accelerate's num_machines, by default,", None)
    ranks = sheet.integer(OF + "num_processes", -1, to="hardware.per_node", off=(-1,), derived=True)
    stated = machines.of_files("nodes")
    if ranks > 0 and "per_node" not in machines.launcher and stated is not None:
        if ranks % stated.number:
            sheet.say(
                "PT821", "error", f"{ranks} processes do not divide over {stated.number} machines",
                "a multiple of the machines", OF + "num_processes",
            )  # fmt: skip
        name = f"num_processes {ranks} over {stated.number} machines"
        each = Stated(max(1, ranks // stated.number), name, sheet.settings[OF + "num_processes"].span)
        machines.launcher["per_node"] = each


def spec_of(sheet: Sheet, inner: Sheet, world: int | None, per_node: int | None) -> SpecDict:
    """Return the sections of the spec; ``inner`` has the keys of DeepSpeed's configuration."""
    below = _below(sheet, inner)
    _left_out(sheet)
    training = _training(sheet)
    parallel = parallel_of(sheet, below, world, per_node)
    spec: SpecDict = {"training": training, "parallel": parallel, "optimizer": {"name": _optimizer(sheet)}}
    if below == "deepspeed":
        spec |= accelerate_deepspeed.spec_of(sheet, inner, world, spec)
    elif below == "megatron":
        spec["engine"] = "megatron"
    # Rates in DeepSpeed's own file count over TrainingArguments, as in Trainer.
    spec["optimizer"] = {**of_trainer(sheet, training.get("steps")), **spec["optimizer"]}
    _batch(sheet, spec, world)
    model = _model(sheet)
    if model:
        spec["model"] = {"preset": model}
    return spec


def trained(sheet: Sheet) -> bool:
    """Return whether there are any ``TrainingArguments``, whose defaults count then."""
    return any(not name.startswith((OF, "launch.")) for name in sheet.settings)


def _below(sheet: Sheet, inner: Sheet) -> str:
    """Return what shards the state: fsdp, deepspeed, megatron, or ddp."""
    path = "parallel.data.zero"
    kind = str(sheet.get(OF + "distributed_type", "NO", to=path)).upper()
    named = str(sheet.get("fsdp", "", to=path) or "").strip("'\"[]").lower()
    used = {name: sheet.flag(f"{OF}use_{name}", to=path) for name in ("deepspeed", "fsdp", "megatron_lm")}
    configured = bool(sheet.get("deepspeed", to="engine"))
    asked = {
        "deepspeed": kind == "DEEPSPEED" or used["deepspeed"] or configured or bool(inner.settings),
        "fsdp": kind == "FSDP" or used["fsdp"] or named not in ("", "false"),
        "megatron": kind == "MEGATRON_LM" or used["megatron_lm"],
    }
    sheet.flag(OF + "multi_gpu", to=path)
    sheet.flag(OF + "use_parallelism_config", to="parallel")
    names = [name for name, on in asked.items() if on]
    if len(names) > 1:
        sheet.say(
            "PT821", "error", f"{' and '.join(names)} are both asked for", "remove one of them", "fsdp", "deepspeed",
            OF + "distributed_type", OF + "use_fsdp", OF + "use_deepspeed",
        )  # fmt: skip
    elif kind not in ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP"):
        sheet.say("PT823", "error", f"{kind} is not priced", "FSDP, DEEPSPEED, MULTI_GPU", OF + "distributed_type")
    if not names and not any(name.startswith((OF, "launch.")) for name in sheet.settings) and _only_files(sheet):
        sheet.say(
            "PT824", "note", "the files do not say what shards the state; plain data parallelism is priced",
            "give accelerate's configuration as another FILE, or --set parallel.data.zero=3",
        )  # fmt: skip
    return names[0] if names else "ddp"


def _only_files(sheet: Sheet) -> bool:
    """Return whether no setting comes from a script, which would say how it starts ranks."""
    return all(setting.file.endswith((".yaml", ".yml", ".json")) for setting in sheet.settings.values())


def _training(sheet: Sheet) -> TrainingDict:
    lengths = [sheet.integer(name, 0, to="training.sequence_length") for name in _LENGTHS]
    length = next((one for one in lengths if one), None)
    if length is None:
        sheet.lacks("training.sequence_length", "the files do not say how long sequences are")
    steps = sheet.integer("max_steps", -1, to="training.steps", off=(-1, 0))
    fields: TrainingDict = {}
    if length is not None:
        fields["sequence_length"] = length
    if steps > 0:
        fields["steps"] = steps
    fields["precision"] = precision(sheet)
    if sheet.flag("full_determinism", to="training.deterministic"):
        fields["deterministic"] = True
    return fields


def precision(sheet: Sheet) -> str:
    """Return the precision: ``TrainingArguments`` count over accelerate's configuration."""
    path = "training.precision"
    bf16, fp16 = sheet.flag("bf16", to=path), sheet.flag("fp16", to=path)
    launch = str(sheet.get(OF + "mixed_precision", "no", to=path) or "no").lower()
    old = sheet.flag(OF + "fp16", to=path)
    sheet.flag("pure_bf16", to=path)
    if bf16 and fp16:
        sheet.say("PT821", "error", "both bf16 and fp16 are true", "set one of them to false", "fp16")
    requested = "bf16" if bf16 else "fp16" if fp16 else ""
    if requested and launch not in ("no", "false", requested):
        sheet.say(
            "PT824", "note", f"accelerate's {launch} gives way to {requested} of TrainingArguments",
            f"mixed_precision: {requested}", OF + "mixed_precision",
        )  # fmt: skip
    dtype = requested or ("fp16" if old else {"no": "fp32", "false": "fp32"}.get(launch, launch))
    if dtype not in ("bf16", "fp16", "fp32", "fp8"):
        sheet.say("PT823", "error", f"{dtype} has no counterpart here", "no, fp16, bf16 or fp8", OF + "mixed_precision")
        return "bf16"
    return dtype


def _optimizer(sheet: Sheet) -> str:
    name = str(sheet.get("optim", "adamw_torch", to="optimizer.name")).lower()
    kinds = {
        r"adamw_(torch|hf|torch_fused|apex_fused|torch_xla)|adamw": "adamw", r"lion_32bit": "lion", r"sgd": "sgd",
        r"adagrad": "adagrad",
    }  # fmt: skip
    if sheet.flag("adafactor", to="optimizer.name"):
        name = "adafactor"
    optimizer = next((kind for words, kind in kinds.items() if re.fullmatch(words, name)), None)
    if optimizer is None:
        sheet.say("PT823", "error", f"the optimizer {name} is not priced here", "adamw_torch", "optim", "adafactor")
    return optimizer or "adamw"


def _model(sheet: Sheet) -> str | None:
    """Return the preset that ``model_name_or_path`` names by its repository or its folder."""
    given = str(sheet.get("model_name_or_path", "", to="model.preset") or "")
    name = _plain(given)
    for preset, record in table("models").items():
        repository = re.search(r"config\.json of (\S+) on Hugging Face", str(record.get("source", "")))
        if name and name in (_plain(preset), _plain(repository[1]) if repository else ""):
            return preset
    if given:
        what = f"{given} is no preset that is known here: add --model with a preset or a config.json"
        sheet.lacks("model.preset", what, "model_name_or_path")
    return None


def _plain(name: str) -> str:
    """Return a model's name without its owner, without endings that say how it was tuned, and without separators."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    last = re.sub(r"^meta-", "", re.sub(r"(-(instruct|base|chat|hf|it))+$", "", last))
    return re.sub(r"[-_ ]", "", last)


def _batch(sheet: Sheet, spec: SpecDict, world: int | None) -> None:
    """Set micro-batch and global batch where DeepSpeed's configuration has not."""
    parallel, training = spec["parallel"], spec["training"]
    to = "parallel.micro_batch"
    sizes = [sheet.integer(f"per_{kind}_train_batch_size", 0, to=to) for kind in ("device", "gpu")]
    micro = next((one for one in sizes if one), 8 if trained(sheet) else None)
    steps = sheet.integer("gradient_accumulation_steps", 0, to="training.global_batch")
    launch = of_launcher(sheet)
    number = sheet.integer(OF + "megatron_lm_config.megatron_lm_num_micro_batches", 0, to="training.global_batch")
    accumulation = number or steps or launch or 1
    if sheet.flag("auto_find_batch_size", to=to):
        sheet.say(
            "PT823", "warning", "the micro-batch is halved until it fits; the first one is priced",
            "set it to false", "auto_find_batch_size",
        )  # fmt: skip
    if micro is None:
        if "micro_batch" not in parallel:
            sheet.lacks("parallel.micro_batch", "the files do not say the micro-batch")
        if "global_batch" not in training:
            sheet.lacks("training.global_batch", "the files do not say the global batch")
        return
    parallel.setdefault("micro_batch", micro)
    others = parallel["tensor"]["degree"] * parallel["sequence"]["degree"] * parallel["pipeline"]["stages"]
    if world is not None and "global_batch" not in training:
        training["global_batch"] = micro * accumulation * max(1, world // others)
    elif "global_batch" not in training:
        sheet.lacks("training.global_batch", "the global batch depends on the number of processes, which is not known")


def _of_factory(sheet: Sheet) -> bool:
    """Return whether the arguments are LLaMA-Factory's (``hparams`` of https://github.com/hiyouga/LLaMA-Factory)."""
    return "cutoff_len" in sheet.settings or {"stage", "template"} <= sheet.settings.keys()


def _left_out(sheet: Sheet) -> None:
    """Say what changes the price and has no field."""
    sheet.findings += adapters.findings(sheet.settings)
    for name in adapters.named(sheet.settings, ignored=NO_EFFECT):
        sheet.get(name, to="nothing: all weights are trained")
    if _of_factory(sheet) and not any(name in sheet.settings for name in ("finetuning_type", "train_type")):
        sheet.say(
            "PT823", "error", "LLaMA-Factory trains adapters (LoRA) where no finetuning_type is given, and partool has "
            "no adapters", "finetuning_type: full prices the run with all weights", "stage", "cutoff_len", "template",
        )  # fmt: skip
    if (stage := sheet.settings.get("stage")) and (other := adapters.task(str(stage.value), stage.span)):
        sheet.findings.append(other)
    for name in ("use_liger_kernel", "use_liger", "enable_liger_kernel"):
        if sheet.flag(name, to="nothing: fused kernels are not priced"):
            sheet.say(
                "PT824", "note", "Liger's fused kernels are not priced: less memory is needed for the loss",
                "no change is needed; the price is on the safe side", name,
            )  # fmt: skip
    narrow = [str(sheet.get(name, "", to="training.precision")).lower() for name in ("torch_dtype", "dtype")]
    plain = not sheet.settings.get("deepspeed") and OF + "fsdp_config.fsdp_version" not in sheet.settings
    if any("16" in one for one in narrow) and plain and precision_is_narrow(sheet):
        sheet.say(
            "PT824", "note", "weights are loaded in 16 bits; where nothing widens them, moments have 16 bits, too, "
            "and they are priced in 32", "torch_dtype: float32", "torch_dtype", "dtype",
        )  # fmt: skip
    if sheet.flag(OF + "split_batches", to="parallel.micro_batch"):
        sheet.say("PT823", "error", "split_batches divides the batch among processes", "false", OF + "split_batches")


def precision_is_narrow(sheet: Sheet) -> bool:
    """Return whether no wider copy of weights comes with FSDP or DeepSpeed."""
    kind = str(getattr(sheet.settings.get(OF + "distributed_type"), "value", "NO")).upper()
    return kind in ("NO", "MULTI_GPU") and "fsdp" not in sheet.settings
