"""Reads Megatron-LM's arguments into a pinned spec.

Meanings and defaults are those of ``megatron/training/arguments.py`` and ``megatron/core`` at commit 000c4ac2 (core
0.15, https://github.com/NVIDIA/Megatron-LM); arguments of Megatron-DeepSpeed are read, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from partool.engines.commands import default_nodes, launcher_without_nodes
from partool.engines.machines import Machines, Stated
from partool.engines.megatron_keys import NO_EFFECT
from partool.engines.megatron_model import chosen, model_of
from partool.engines.megatron_recompute import recompute_of
from partool.engines.megatron_unpriced import UNPRICED
from partool.engines.recipes import of_megatron
from partool.engines.sections import (
    OffloadDict,
    OptimizerDict,
    ParallelDict,
    PipelineDict,
    SequenceDict,
    SpecDict,
    TrainingDict,
    tensor_section,
)
from partool.engines.settings import Setting, Sheet, whole_of
from partool.engines.shell import Word

LAUNCHER = {
    "nproc-per-node": "per_node", "num-gpus": "per_node", "nnodes": "nodes", "nnode": "nodes", "num-nodes": "nodes",
}  # fmt: skip
"""Options of torchrun, or of DeepSpeed's launcher → fields of ``hardware``."""
SCRIPT = re.compile(r"(^|/)\w+\.py$")
"""Words that name a Python script."""
_OTHER_MODELS = re.compile(r"(^|/)\w*(bert|t5|ict|retro|vision|mamba|hybrid|vlm|multimodal|llava)\w*(/\w+)?\.py$", re.I)
_END = re.compile(r"^(\||\|&|&&|\|\||&|;|\d?&?>>?.*|>&.*)$")
"""Words of a command behind which arguments of another command, or none, follow."""
_EXCHANGES = {"p2p": "ring", "a2a": "ulysses", "all_gather": "all_gather", "allgather": "all_gather"}
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "lion": "lion"}
KNOWN = NO_EFFECT.keys() | UNPRICED.keys() | {"q-lora-rank", "kv-lora-rank", "o-lora-rank"}
"""Arguments whose names say less than the tables do: latent attention has ranks that are called lora."""
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def settings(words: Sequence[Word]) -> dict[str, Setting]:
    """Return the arguments of a command by name, with dashes between and none before.

    Before the Python script only arguments that say something of the ranks count; the others are of programs that
    start it.
    """
    arguments: dict[str, Setting] = {}
    script = next((place for place, word in enumerate(words) if SCRIPT.search(word.text)), -1)
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if place > script and _END.match(word.text):
            break
        if not word.text.startswith("--"):
            continue
        name, _, given = word.text[2:].partition("=")
        name = name.replace("_", "-")
        values = [given] if given else []
        while not given and place < len(words) and not _is_name(words[place]) and place != script:
            if _END.match(words[place].text):
                break
            values.append(words[place].text)
            place += 1
        if place <= script and name not in LAUNCHER and name not in NO_EFFECT:
            continue
        value = True if not values else values[0] if len(values) == 1 else tuple(values)
        arguments[name] = Setting(name, value, word.file, word.line)
    return arguments


def _is_name(word: Word) -> bool:
    return word.text.startswith("--") or (word.text.startswith("-") and not re.match(r"-[\d.]", word.text))


def program_of(words: Sequence[Word]) -> Word | None:
    """Return the Python script of a command if it trains another kind of model than a decoder of text."""
    script = next((word for word in words if SCRIPT.search(word.text)), None)
    return script if script is not None and _OTHER_MODELS.search(script.text) else None


def machines_of(sheet: Sheet, scheduler: Mapping[str, Stated], command: Sequence[Word]) -> Machines:
    """Return what a command says of its machines; ``scheduler`` has what the script asks Slurm for."""
    machines = Machines(scheduler=dict(scheduler))
    for option, target in LAUNCHER.items():
        if option in sheet.settings:
            sheet.get(option, to=f"hardware.{target}")
            machines.option(sheet.settings[option], target)
    default_nodes(machines, launcher_without_nodes(command))
    return machines


def spec_of(sheet: Sheet, world: int | None) -> SpecDict:
    """Return the sections ``model``, ``training``, ``parallel`` and ``optimizer``; ``world`` is the number of ranks."""
    tensor: int = sheet.integer("tensor-model-parallel-size", 1, to="parallel.tensor.degree")
    model = model_of(sheet, tensor)
    optimizer: OptimizerDict = {"name": chosen(sheet, "optimizer", "adam", _OPTIMIZERS, to="optimizer.name")}
    parallel = _parallel(sheet, model, tensor)
    if "micro_batch" not in parallel:
        sheet.lacks("parallel.micro_batch", "the arguments do not say the micro-batch")
    training = _training(sheet, parallel, world)
    _dropout(sheet)
    optimizer |= of_megatron(sheet, training.get("steps"), training.get("global_batch"))
    return {"model": model, "training": training, "parallel": parallel, "optimizer": optimizer}


def _dropout(sheet: Sheet) -> None:
    for name in ("attention-dropout", "hidden-dropout"):
        share = sheet.number(name, 0.1, to="nothing: partool's models have no dropout")
        if share:
            given = "by default" if name not in sheet.settings else "here"
            sheet.say(
                "PT824", "note", f"{name} is {share} {given}; masks and their time are not priced",
                f"--{name} 0.0, as most recipes have", name,
            )  # fmt: skip


def _training(sheet: Sheet, parallel: ParallelDict, world: int | None) -> TrainingDict:
    batch = sheet.integer("global-batch-size", to="training.global_batch")
    length = sheet.integer("seq-length", to="training.sequence_length")
    if batch is None and world and "global-batch-size" not in sheet.settings and parallel.get("micro_batch"):
        ranks = parallel["tensor"]["degree"] * parallel["pipeline"]["stages"] * parallel["sequence"]["degree"]
        batch = parallel["micro_batch"] * max(1, world // ranks)
    if length is None:
        sheet.lacks("training.sequence_length", "the arguments do not say how long sequences are")
    if batch is None:
        sheet.lacks("training.global_batch", "without --global-batch-size the batch depends on the number of ranks")
    steps, precision = sheet.integer("train-iters", to="training.steps"), _precision(sheet)
    samples = sheet.integer("train-samples", to="training.steps", derived=True)
    if samples and batch:
        steps = max(1, samples // batch)
    sizes = {"sequence_length": length, "global_batch": batch, "steps": steps}
    fields = cast(TrainingDict, {field: value for field, value in sizes.items() if value is not None})
    fields["precision"] = precision
    if every := sheet.integer("eval-interval", to="training.validation.every", least=0):
        batches = sheet.integer("eval-iters", 100, to="training.validation.samples", off=(-1, 0), derived=True)
        fields["validation"] = {"every": every, "samples": batches * (batch or 1)} if batches > 0 else {"every": 0}
    sheet.get("eval-iters", to="training.validation.samples")
    if "rampup-batch-size" in sheet.settings:
        sheet.get("rampup-batch-size", to="training.global_batch")
        sheet.say(
            "PT824", "note", "the global batch grows during the run; its last size is priced",
            "--set training.global_batch=NUMBER prices another one", "rampup-batch-size",
        )  # fmt: skip
    return fields


def _precision(sheet: Sheet) -> str:
    given = [name for name in ("bf16", "fp16") if sheet.switch(name, to="training.precision")]
    if len(given) == 2:
        sheet.say("PT821", "error", "both --bf16 and --fp16 are given", "remove one of them", "fp16")
    if sheet.any("fp8-format", "fp8-hybrid", "fp8-e4m3", to="training.precision"):
        return "fp8"
    return given[0] if given else "fp32"


def _parallel(sheet: Sheet, model: Mapping[str, object], tensor: int) -> ParallelDict:
    together = sheet.switch("sequence-parallel", to="parallel.tensor.sequence_norms")
    layers = cast(int | None, model.get("layers"))
    pipeline, micro_batch = _pipeline(sheet, layers), sheet.integer("micro-batch-size", to="parallel.micro_batch")
    parallel: ParallelDict = {} if micro_batch is None else {"micro_batch": micro_batch}
    parallel |= {
        "data": {"zero": _zero(sheet)},
        "tensor": tensor_section(tensor, sequence_norms=bool(together)),
        "tiles": {"mlp": 0, "loss": 0},
        "compile": "block",
        "pipeline": pipeline,
        "sequence": _sequence(sheet),
        "offload": _offload(sheet),
        "recompute": recompute_of(sheet, layers or 1, pipeline),
    }
    if "moe" in model:
        old = sheet.integer("moe-expert-parallel-size", 1, to="parallel.expert")
        parallel["expert"] = sheet.integer("expert-model-parallel-size", old, to="parallel.expert")
        parallel["expert_tensor"] = sheet.integer("expert-tensor-parallel-size", tensor, to="parallel.expert_tensor")
    else:
        sheet.get("expert-model-parallel-size", to="parallel.expert")
        sheet.get("expert-tensor-parallel-size", to="parallel.expert_tensor")
    return parallel


def _zero(sheet: Sheet) -> int:
    stage = 1 if sheet.switch("use-distributed-optimizer", to="parallel.data.zero") else 0
    how = str(sheet.get("data-parallel-sharding-strategy", "no_shard", to="parallel.data.zero"))
    if sheet.any("use-custom-fsdp", "use-megatron-fsdp", to="parallel.data.zero"):
        return max(stage, _SHARDING.get(how, 0))
    if "deepspeed" in sheet.settings:
        sheet.say(
            "PT824", "warning", "Megatron-DeepSpeed is priced with Megatron-LM's constants",
            "add --set engine=deepspeed to price it with DeepSpeed's", "deepspeed",
        )  # fmt: skip
        if "zero-stage" not in sheet.settings:
            sheet.lacks("parallel.data.zero", "the stage of ZeRO is in another file", "deepspeed-config", "deepspeed")
        return int(sheet.integer("zero-stage", 0, to="parallel.data.zero", least=0))
    kept = sheet.switch("torch-fsdp2-no-reshard-after-forward", to="parallel.data.zero")
    return (2 if kept else 3) if sheet.switch("use-torch-fsdp2", to="parallel.data.zero") else stage


def _pipeline(sheet: Sheet, layers: int | None) -> PipelineDict:
    stages = sheet.integer("pipeline-model-parallel-size", 1, to="parallel.pipeline.stages")
    each = sheet.integer("num-layers-per-virtual-pipeline-stage", to="parallel.pipeline.chunks")
    chunks = sheet.integer("num-virtual-stages-per-pipeline-rank", 1, to="parallel.pipeline.chunks")
    stage = _stages(sheet, layers or 0, stages)
    both = ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage")
    if all(name in sheet.settings for name in both):
        sheet.say(
            "PT821", "error", f"both --{both[0]} and --{both[1]} say how stages are divided", "remove one of them",
            *both,
        )  # fmt: skip
    elif each and layers and stages > 1:
        chunks, rest = divmod(layers + _counted(sheet).count(True), stages * each)
        if rest:
            sheet.say(
                "PT821", "error",
                f"{layers} layers over {stages} stages do not divide into virtual stages of {each} layers",
                "virtual stages whose layers divide those of a stage", "num-layers-per-virtual-pipeline-stage",
            )  # fmt: skip
    if stages <= 1:
        return {"stages": 1}
    pipeline: PipelineDict = {"stages": stages, "schedule": "interleaved" if chunks > 1 else "1f1b"}
    if chunks > 1:
        pipeline["chunks"] = chunks
    if stage and all(number % chunks == 0 for number in stage):
        pipeline["layers"] = [number // chunks for _ in range(chunks) for number in stage]
        first, last = _counted(sheet)
        pipeline["layers"][0] -= first
        pipeline["layers"][-1] -= last
    return pipeline


def _counted(sheet: Sheet) -> list[bool]:
    """Return whether the embedding, and whether the loss, count as a layer where layers are divided over stages."""
    method = str(sheet.get("pp-partition-method", "", to="parallel.pipeline.layers"))
    names = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")
    return [bool(sheet.get(name, "embedding" in method, to="parallel.pipeline.layers")) for name in names]


def _stages(sheet: Sheet, layers: int, stages: int) -> list[int]:
    """Return the layers of each stage, with those that :func:`_counted` adds; empty if they do not divide."""
    given = {
        place: sheet.integer(f"decoder-{word}-pipeline-num-layers", to="parallel.pipeline.layers", least=0)
        for word, place in (("first", 0), ("last", stages - 1))
    }
    fixed = {place: number for place, number in given.items() if number is not None}
    rest = layers - sum(fixed.values()) + (0 if fixed else _counted(sheet).count(True))
    others = stages - len(fixed)
    if not layers or stages <= 1 or others <= 0 or rest % others:
        return []
    return [fixed.get(place, rest // others) for place in range(stages)]


def _sequence(sheet: Sheet) -> SequenceDict:
    theirs = sheet.integer("ds-sequence-parallel-size", 1, to="parallel.sequence.degree")
    if theirs > 1:
        return {"degree": theirs, "method": "ulysses"}
    degree = sheet.integer("context-parallel-size", 1, to="parallel.sequence.degree")
    kind = sheet.get("cp-comm-type", "p2p", to="parallel.sequence.method")
    levels = sheet.get("hierarchical-context-parallel-sizes", to="parallel.sequence.ulysses")
    if degree <= 1:
        return {"degree": 1}
    if kind == "a2a+p2p" and isinstance(levels, tuple) and len(levels) == 2 and (inner := whole_of(levels[0])):
        return {"degree": degree, "method": "usp", "ulysses": inner}
    method = _EXCHANGES.get(str(kind))
    if method is None:
        sheet.say(
            "PT823", "error", f"cp-comm-type {kind!r} has no counterpart here", "p2p, a2a or all_gather", "cp-comm-type"
        )
    section: SequenceDict = {"degree": degree, "method": method or "ring"}
    if method == "ring":
        section["order"] = "zigzag"
    return section


def _offload(sheet: Sheet) -> OffloadDict:
    kept = sheet.switch("checkpoint-in-cpu", to="parallel.offload.activations")
    offload: OffloadDict = {"optimizer": "none", "parameters": "none", "activations": "cpu" if kept else "none"}
    share = sheet.number("optimizer-offload-fraction", 1.0, to="parallel.offload.gpu_fraction")
    if sheet.any("optimizer-cpu-offload", "cpu-optimizer", to="parallel.offload.optimizer") and share:
        offload |= {"optimizer": "cpu", "gpu_fraction": round(1.0 - share, 6)}
    return offload
