"""Reads Megatron-LM's arguments into a pinned spec.

Meanings and defaults are those of ``megatron/training/arguments.py`` of core 0.12
(https://github.com/NVIDIA/Megatron-LM).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from partool.engines.settings import Setting, Sheet
from partool.engines.shell import Word

LAUNCHER = {"nproc_per_node": "per_node", "nnodes": "nodes", "nnode": "nodes"}
"""Options of torchrun → fields of ``hardware``."""
_SCRIPT = re.compile(r"(^|/)\w+\.py$")
_TOKENIZERS = {"Llama2Tokenizer": 32000, "GPT2BPETokenizer": 50257}
_EXCHANGES = {"p2p": "ring", "a2a": "ulysses", "all_gather": "all_gather", "allgather": "all_gather"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def settings(words: list[Word]) -> dict[str, Setting]:
    """Return the arguments of a command by name, without dashes; those of the launcher before the script included."""
    found: dict[str, Setting] = {}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.text.startswith("--"):
            continue
        name, _, given = word.text[2:].partition("=")
        values = [given] if given else []
        while not given and place < len(words) and not _is_name(words[place]) and not _SCRIPT.search(words[place].text):
            values.append(words[place].text)
            place += 1
        value = True if not values else values[0] if len(values) == 1 else tuple(values)
        found[name] = Setting(name, value, word.file, word.line)
    return found


def _is_name(word: Word) -> bool:
    return word.text.startswith("--") or (word.text.startswith("-") and not re.match(r"-[\d.]", word.text))


def spec_of(sheet: Sheet) -> dict[str, Any]:
    """Return the sections ``model``, ``hardware``, ``training``, ``parallel`` and ``optimizer`` of the spec."""
    hardware = {}
    for option, field in LAUNCHER.items():
        for name in (option, option.replace("_", "-")):
            if (number := sheet.number(name, to=f"hardware.{field}")) is not None:
                hardware[field] = number
    model = _model(sheet)
    optimizer = {"name": _chosen(sheet, "optimizer", "adam", _OPTIMIZERS, to="optimizer.name")}
    parallel = _parallel(sheet, model)
    if "micro_batch" not in parallel:
        sheet.lacks("parallel.micro_batch", "the arguments do not say the micro-batch")
    training = _training(sheet)
    return {
        "model": model, "hardware": hardware, "training": training, "parallel": parallel, "optimizer": optimizer
    }  # fmt: skip


def _model(sheet: Sheet) -> dict[str, Any]:
    model: dict[str, Any] = {
        field: sheet.number(name, to=f"model.{field}")
        for name, field in (
            ("num-layers", "layers"), ("hidden-size", "hidden"), ("ffn-hidden-size", "ffn_hidden"),
            ("num-attention-heads", "heads"), ("kv-channels", "head_dim"), ("max-position-embeddings", "max_position"),
        )
    }  # fmt: skip
    if sheet.get("group-query-attention", False, to="model.kv_heads"):
        model["kv_heads"] = sheet.number("num-query-groups", 1, to="model.kv_heads")
    elif "num-query-groups" in sheet.settings:
        sheet.say(
            "PT821", "error", "num-query-groups has no effect without --group-query-attention",
            "add --group-query-attention, or remove --num-query-groups", "num-query-groups",
        )  # fmt: skip
        sheet.get("num-query-groups", to="model.kv_heads")
    model["vocab"] = _vocabulary(sheet)
    model["norm"] = _chosen(sheet, "normalization", "LayerNorm", _NORMS, to="model.norm")
    gated = sheet.get("swiglu", False, to="model.activation")
    model["activation"] = "swiglu" if gated else "gelu"
    model["position"] = _position(sheet)
    bias = not sheet.get("disable-bias-linear", False, to="model.ffn_bias")
    model |= {"qkv_bias": bias or bool(sheet.get("add-qkv-bias", False, to="model.qkv_bias"))}
    model |= {"out_bias": bias, "ffn_bias": bias}
    model["qk_norm"] = bool(sheet.get("qk-layernorm", False, to="model.qk_norm"))
    model["tied_embeddings"] = not sheet.get("untie-embeddings-and-output-weights", False, to="model.tied_embeddings")
    if sheet.get("multi-latent-attention", False, to="model.mla"):
        model["mla"], model["qk_norm"] = _latent(sheet), False
        for name in ("kv_heads", "head_dim"):
            model.pop(name, None)
    if "num-experts" in sheet.settings:
        model["moe"] = _experts(sheet, model)
    _dropout(sheet)
    return {field: value for field, value in model.items() if value is not None}


def _vocabulary(sheet: Sheet) -> int | None:
    padded, plain = (sheet.number(name, to="model.vocab") for name in ("padded-vocab-size", "vocab-size"))
    if padded is not None or plain is not None:
        return int(plain if padded is None else padded)
    kind = sheet.settings.get("tokenizer-type")
    size = _TOKENIZERS.get(str(kind.value)) if kind else None
    if size is None:
        what = "the arguments do not say how large the vocabulary is: the tokenizer's files do"
        sheet.lacks("model.vocab", what, "tokenizer-type")
    return size


def _position(sheet: Sheet) -> str:
    found = _chosen(sheet, "position-embedding-type", "learned_absolute", _POSITIONS, to="model.position")
    return "rope" if sheet.get("use-rotary-position-embeddings", False, to="model.position") else found


def _chosen(sheet: Sheet, name: str, default: str, known: Mapping[str, str], *, to: str) -> str:
    """Return what a spec has in place of an argument's word; a finding for a word that is not ``known``."""
    word = str(sheet.get(name, default, to=to))
    if word not in known:
        sheet.say("PT823", "error", f"{name} {word} has no counterpart here", " or ".join(known), name)
    return known.get(word, known[default])


def _latent(sheet: Sheet) -> dict[str, Any]:
    ranks = {
        "q_rank": sheet.number("q-lora-rank", to="model.mla.q_rank"),
        "kv_rank": sheet.number("kv-lora-rank", 32, to="model.mla.kv_rank"),
        "nope_head_dim": sheet.number("qk-head-dim", 128, to="model.mla.nope_head_dim"),
        "rope_head_dim": sheet.number("qk-pos-emb-head-dim", 64, to="model.mla.rope_head_dim"),
        "v_head_dim": sheet.number("v-head-dim", 128, to="model.mla.v_head_dim"),
    }
    return {name: value for name, value in ranks.items() if value is not None}


def _experts(sheet: Sheet, model: dict[str, Any]) -> dict[str, Any]:
    inner = sheet.number("moe-ffn-hidden-size", model.get("ffn_hidden"), to="model.moe.ffn_hidden")
    found: dict[str, Any] = {
        "experts": sheet.number("num-experts", to="model.moe.experts"),
        "top_k": sheet.number("moe-router-topk", 2, to="model.moe.top_k"),
        "ffn_hidden": inner,
        "scores": str(sheet.get("moe-router-score-function", "softmax", to="model.moe.scores")),
        "groups": sheet.number("moe-router-num-groups", 1, to="model.moe.groups"),
        "top_groups": sheet.number("moe-router-group-topk", 1, to="model.moe.top_groups"),
        "capacity": sheet.number("moe-expert-capacity-factor", to="model.moe.capacity"),
    }
    if sheet.get("moe-router-enable-expert-bias", False, to="model.moe.bias_rate"):
        found["bias_rate"] = 0.001
    shared = sheet.number("moe-shared-expert-intermediate-size", 0, to="model.moe.shared_experts")
    if inner and shared:
        found["shared_experts"], rest = divmod(int(shared), int(inner))
        if rest:
            sheet.say(
                "PT823", "error", f"the shared expert has width {shared}, which is no multiple of an expert's {inner}",
                "a multiple, or price it without: --set model.moe.shared_experts=0",
                "moe-shared-expert-intermediate-size",
            )  # fmt: skip
    found |= _frequency(sheet, model.get("layers") or 0)
    return {name: value for name, value in found.items() if value is not None}


def _frequency(sheet: Sheet, layers: int) -> dict[str, int]:
    """Return which layers have experts: ``moe-layer-freq`` is every n-th, or a list of 0 and 1 as Python writes it."""
    given = sheet.get("moe-layer-freq", "1", to="model.moe.first_dense_layers")
    if str(given).isdigit():
        return {} if int(given) == 1 else {"every": int(given)}
    pattern = _listed(str(given))
    dense = pattern.index(1) if pattern and 1 in pattern else -1
    if pattern is None or len(pattern) != layers or dense < 0 or 0 in pattern[dense:]:
        sheet.say(
            "PT823", "error", f"moe-layer-freq {given!r} is not dense layers followed by layers with experts",
            "a number, or ([0]*n+[1]*m) with n + m layers", "moe-layer-freq",
        )  # fmt: skip
        return {}
    return {"first_dense_layers": dense}


def _listed(text: str) -> list[int] | None:
    """Return the list that an expression of lists, ``+`` and ``*`` stands for, without evaluating anything else."""

    def value(node: ast.expr) -> list[int]:
        if isinstance(node, ast.List):
            return [int(each.value) for each in node.elts if isinstance(each, ast.Constant)]  # type: ignore[arg-type]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
            times: int = min(int(node.right.value), 1000)  # type: ignore[arg-type]
            return value(node.left) * times
        raise ValueError(ast.dump(node))

    try:
        return value(ast.parse(text.strip("'\""), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        return None


def _dropout(sheet: Sheet) -> None:
    for name in ("attention-dropout", "hidden-dropout"):
        share = sheet.number(name, 0.1, to="nothing: partool's models have no dropout")
        if share:
            given = "by default" if name not in sheet.settings else "here"
            sheet.say(
                "PT824", "note", f"{name} is {share} {given}; masks and their time are not priced",
                f"--{name} 0.0, as most recipes have", name,
            )  # fmt: skip


def _training(sheet: Sheet) -> dict[str, Any]:
    batch = sheet.number("global-batch-size", to="training.global_batch")
    length = sheet.number("seq-length", to="training.sequence_length")
    if length is None:
        sheet.lacks("training.sequence_length", "the arguments do not say how long sequences are")
    if batch is None:
        sheet.lacks("training.global_batch", "without --global-batch-size the batch depends on the number of ranks")
    found: dict[str, Any] = {
        "sequence_length": length,
        "global_batch": batch,
        "steps": sheet.number("train-iters", to="training.steps"),
        "precision": _precision(sheet),
    }
    samples = sheet.number("train-samples", to="training.steps")
    if samples and batch:
        found["steps"] = max(1, samples // batch)
    if every := sheet.number("eval-interval", to="training.validation.every"):
        batches = sheet.number("eval-iters", 100, to="training.validation.samples")
        found["validation"] = {"every": every if batches else 0, "samples": max(1, (batches or 0) * (batch or 1))}
    if "rampup-batch-size" in sheet.settings:
        sheet.get("rampup-batch-size", to="training.global_batch")
        sheet.say(
            "PT824", "note", "the global batch grows during the run; its last size is priced",
            "--set training.global_batch=NUMBER prices another one", "rampup-batch-size",
        )  # fmt: skip
    return {field: value for field, value in found.items() if value is not None}


def _precision(sheet: Sheet) -> str:
    if sheet.get("bf16", False, to="training.precision") and sheet.get("fp16", False, to="training.precision"):
        sheet.say("PT821", "error", "both --bf16 and --fp16 are given", "remove one of them", "fp16")
    names = ("fp8-format", "fp8-hybrid", "fp8-e4m3")
    if any(sheet.get(name, False, to="training.precision") for name in names):
        return "fp8"
    return next((name for name in ("bf16", "fp16") if sheet.settings.get(name)), "fp32")


def _parallel(sheet: Sheet, model: dict[str, Any]) -> dict[str, Any]:
    tensor = sheet.number("tensor-model-parallel-size", 1, to="parallel.tensor")
    together = sheet.get("sequence-parallel", False, to="parallel.tensor.sequence_norms")
    parallel: dict[str, Any] = {
        "micro_batch": sheet.number("micro-batch-size", to="parallel.micro_batch"),
        "data": {"zero": _zero(sheet)},
        "tensor": {"degree": tensor}
        | ({"shape": [tensor, 1], "sequence_norms": bool(together), "overlap": "none"} if tensor > 1 else {}),
        "tiles": {"mlp": 0, "loss": 0},
        "compile": "block",
        "pipeline": _pipeline(sheet, model.get("layers")),
        "sequence": _sequence(sheet),
        "offload": _offload(sheet),
        "recompute": _recompute(sheet, model.get("layers") or 1),
    }
    if "moe" in model:
        parallel["expert"] = sheet.number("expert-model-parallel-size", 1, to="parallel.expert")
        if (inside := sheet.number("expert-tensor-parallel-size", to="parallel.expert_tensor")) is not None:
            parallel["expert_tensor"] = inside
    return {field: value for field, value in parallel.items() if value is not None}


def _zero(sheet: Sheet) -> int:
    stage = 1 if sheet.get("use-distributed-optimizer", False, to="parallel.data.zero") else 0
    how = str(sheet.get("data-parallel-sharding-strategy", "no_shard", to="parallel.data.zero"))
    if any(sheet.get(name, False, to="parallel.data.zero") for name in ("use-custom-fsdp", "use-megatron-fsdp")):
        return max(stage, _SHARDING.get(how, 0))
    return 3 if sheet.get("use-torch-fsdp2", False, to="parallel.data.zero") else stage


def _pipeline(sheet: Sheet, layers: int | None) -> dict[str, Any]:
    stages = sheet.number("pipeline-model-parallel-size", 1, to="parallel.pipeline.stages")
    each = sheet.number("num-layers-per-virtual-pipeline-stage", to="parallel.pipeline.chunks")
    chunks = sheet.number("num-virtual-stages-per-pipeline-rank", 1, to="parallel.pipeline.chunks")
    if each and layers and stages > 1:
        chunks, rest = divmod(layers, stages * each)
        if rest:
            sheet.say(
                "PT821", "error",
                f"{layers} layers over {stages} stages do not divide into virtual stages of {each} layers",
                "virtual stages whose layers divide those of a stage", "num-layers-per-virtual-pipeline-stage",
            )  # fmt: skip
    if stages <= 1:
        return {"stages": 1}
    found: dict[str, Any] = {"stages": stages, "schedule": "interleaved" if chunks > 1 else "1f1b"}
    if chunks > 1:
        found["chunks"] = chunks
    if layers and layers % (stages * chunks) == 0:
        found["layers"] = [layers // (stages * chunks)] * (stages * chunks)
    return found


def _sequence(sheet: Sheet) -> dict[str, Any]:
    degree = sheet.number("context-parallel-size", 1, to="parallel.sequence.degree")
    kind = sheet.get("cp-comm-type", "p2p", to="parallel.sequence.method")
    if degree <= 1:
        return {"degree": 1}
    method = _EXCHANGES.get(str(kind))
    if method is None:
        sheet.say(
            "PT823", "error", f"cp-comm-type {kind!r} has no counterpart here", "p2p, a2a or all_gather", "cp-comm-type"
        )
    return {"degree": degree, "method": method or "ring"} | ({"order": "zigzag"} if method == "ring" else {})


def _offload(sheet: Sheet) -> dict[str, Any]:
    found: dict[str, Any] = {"optimizer": "none", "parameters": "none", "activations": "none"}
    share = sheet.number("optimizer-offload-fraction", 1.0, to="parallel.offload.gpu_fraction")
    if sheet.get("optimizer-cpu-offload", False, to="parallel.offload.optimizer") and share:
        found |= {"optimizer": "cpu", "gpu_fraction": round(1.0 - share, 6)}
    return found


def _recompute(sheet: Sheet, layers: int) -> str | list[str]:
    """Return the policy of all layers, or of each: ``block`` recomputes the first layers of every pipeline stage."""
    kind = sheet.get("recompute-granularity", to="parallel.recompute")
    if sheet.get("recompute-activations", False, to="parallel.recompute"):
        kind = kind or "selective"
    how = sheet.get("recompute-method", to="parallel.recompute")
    number = sheet.number("recompute-num-layers", 1, to="parallel.recompute")
    sheet.get("recompute-modules", to="parallel.recompute")
    if kind != "full":
        return "attention" if kind == "selective" else "none"
    if how is None:
        sheet.say(
            "PT821", "error", "full recomputation needs --recompute-method", "uniform, or block with "
            "--recompute-num-layers", "recompute-granularity",
        )  # fmt: skip
    if how != "block":
        return "full"
    stages = max(1, int(sheet.number("pipeline-model-parallel-size", 1, to="parallel.pipeline.stages")))
    size = -(-layers // stages)
    return ["full" if place % size < number else "none" for place in range(layers)]
