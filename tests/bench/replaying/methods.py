"""How a row was run: code base, ZeRO stage, schedule, recomputation, or why a spec cannot express it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from partool.cost.case import FULL
from partool.cost.stacks import STACKS, Stack
from replaying.cells import Cells
from replaying.models import hybrid

_INEXPRESSIBLE = (
    (r"\bq?lora\b|adalora|peft|dora\b|adapter|vera\b|prefix|prompt|\bia3\b|rank\d+", "tuning of few parameters"),
    (r"\bmuon\b", "the Muon optimizer"),
    (r"8-?bit adam|paged ?adam|adamw?8bit|adafactor|sgd\b|in backward|fused in(to)? backward", "another optimizer"),
    (r"v-half|v-min|zbv|dualpipe|hanayo|bitpipe|chimera", "a schedule that is not there yet"),
    (r"\bnvme\b|infinity", "states on NVMe"),
    (r"context only|bert|inference only|vision|multimodal|vlm\b", "not the training of a decoder"),
)  # fmt: skip
AGAIN = r"incl(\.|udes|uding|ude)? (the )?recomput|hardware flops"
"""Notes that say that FLOPs count recomputation, so there was some."""
_LONG = 131072
"""Tokens from which trainers that shard by ZeRO cannot hold the logits, and fuse the head with its loss."""
_OLD = (
    "vtrain",
    "sc21",
    "sc'21",
    "bigscience",
    "bloom",
    "korthikanti",
    "mt-nlg",
    "megatron-deepspeed",
    "reducing activation",
)
_MEGATRON = (
    "megatron",
    "nemo",
    "dgx",
    "dgxc",
    "primus",
    "bridge",
    "transformerengine",
    "transformer engine",
    "modelzoo",
    "swiss",
)


def inexpressible(cells: Cells) -> str | None:
    """Return why no spec can say what a row did, or None."""
    text = cells.lower("method", "optimizer", "vpp_or_schedule", "zero_or_fsdp", "dtype", "model")
    for pattern, reason in _INEXPRESSIBLE:
        if re.search(pattern, text):
            return reason
    if hybrid(cells.text("model")):
        return "not the training of a decoder with attention"
    if re.search(r"optimizer (fused )?in backward|8-?bit adam", cells.lower("notes")):
        return "another optimizer"
    if "torchtune" in cells.lower("source") and "single device" in cells.lower("model", "method"):
        return "another optimizer"  # its full_finetune_single_device recipes: paged 8-bit Adam, fused into backward
    method = cells.lower("method")
    if method and not re.search(r"full|pre-?train|fine-?tun|sft", method):
        return "tuning of few parameters"
    task = re.search(r"task ([a-z-]+)", cells.lower("notes"))
    if task and "lora" in task.group(1):
        return "tuning of few parameters"
    return None


def stack_of(cells: Cells) -> Stack:
    """Return the row of :data:`STACKS` that ran a published run, by names that appear in it."""
    source, text = cells.lower("source"), cells.everything
    found = _named(
        source,
        f"{text} {cells.lower('dtype')}",
        cells.lower("zero_or_fsdp"),
        cells.count("year", 2024),
        cells.count("pp", 1) > 1,
    )
    if cells.lower("sequence_parallel").startswith(("y", "true", "1")):
        found = replace(found, sequence_parallel=True)
    if cells.lower("sequence_parallel").startswith(("n", "false", "0")):
        found = replace(found, sequence_parallel=False)
    if cells.lower("notes").startswith("deepcompile"):
        found = replace(found, elementwise=1.2, derate=1.05)
    if found.name.startswith("megatron") and re.search(r"\bv100|\bt4\b", cells.lower("gpu")):
        found = replace(found, attention="unfused")  # flash attention needs Ampere or newer
    if "async tp" in text:
        found = replace(found, overlap_tensor=0.5)
    if found.name == "megatron" and cells.count("year") >= 2025:
        found = replace(found, sends_once=True, overlap_expert=0.6)
    if found.attention == "flash2" and cells.count("year") >= 2025:
        found = replace(found, attention="flash3")
    if "liger" in text or (found.name == "deepspeed" and cells.count("seq_len") >= _LONG):
        found = replace(
            found, name=f"{found.name}+fused-loss", logit_bytes=8.0, elementwise=min(found.elementwise, 1.2)
        )
    return found


def _named(source: str, text: str, zero: str, year: int, pipeline: bool) -> Stack:
    if "torchtune" in source:
        return STACKS["torchtune"]
    if "peft" in source and "bfloat16" in text:
        # Transformers' own trainer on weights of that type: no wide copies, heads of keys repeated, the whole loss.
        return replace(STACKS["torchtune"], name="torchtune+whole-loss")
    if "torchtitan" in source or "fsdp2" in text or "torchao" in source or "titan" in source:
        eager = "no compile" in text or "compile" not in text
        return STACKS["fsdp2" if eager else "fsdp2-compiled"]
    if "nanotron" in source or "picotron" in source:
        return STACKS["nanotron"]
    if any(part in source for part in _OLD):
        return STACKS["deepspeed-2021" if "zero-3" in zero else "megatron-2021"]
    if any(part in source for part in _MEGATRON):
        return STACKS["fsdp1" if "fsdp" in text and "megatron" not in text else "megatron"]
    if pipeline and "deepspeed" not in text:
        return STACKS["megatron"]
    if "deepspeed" in text or "zero-" in text or "trl" in source:
        if "megatron-lm sp" in text:
            return replace(STACKS["megatron"], attention="flash2", overlap_tensor=0.0)
        return STACKS["deepspeed-2021" if year <= 2021 else "deepspeed"]
    if "fsdp" in text or "foundry" in source:
        return STACKS["fsdp1"]
    return STACKS["megatron" if re.search(r"\btp", text) else "fsdp2"]


def zero_of(cells: Cells, stack: Stack, dp: int) -> int:
    """Return the ZeRO stage of a row: as printed, else what the code base does by itself."""
    text = cells.lower("zero_or_fsdp", "method")
    if dp == 1 and "offload" not in text:
        return 0
    for pattern, stage in (
        (r"zero-?3|zero stage 3|full_shard", 3), (r"zero-?2|shard_grad_op", 2), (r"fsdp", 3), (r"hsdp", 3),
        (r"zero-?1|distributed optimizer|dist.?opt", 1), (r"ddp|zero-?0|none|\bno\b", 0),
    ):  # fmt: skip
        if re.search(pattern, text):
            return stage
    base = stack.name.split("+")[0]
    return {
        "megatron": 1,
        "nanotron": 1,
        "deepspeed": 3,
        "deepspeed-2021": 3,
        "fsdp1": 3,
        "fsdp2": 3,
        "fsdp2-compiled": 3,
        "torchtune": 3,
    }.get(base, 0)


@dataclass(frozen=True)
class Recompute:
    """A policy as index of ``partool.cost.case.RECOMPUTE``, and the share of the layers that follow it."""

    policy: int
    share: float = 1.0


def recompute_of(cells: Cells, stack: Stack) -> list[Recompute]:
    """Return what a row recomputes: as printed, or what it may be, the cheapest first."""
    text = cells.lower("recompute")
    own = 2 if stack.name.startswith("fsdp2") else 1
    if re.search(r"every (2nd|second|other)|half", text):
        return [Recompute(FULL, 0.5)]
    if "per op" in text or "per-op" in text:
        return [Recompute(2)]
    if "full" in text or text in ("yes", "true", "1", "on", "ac"):
        return [Recompute(FULL)]
    if "select" in text:
        return [Recompute(own)]
    if "core_attn" in text or "core attention" in text:
        return [Recompute(1)]
    if re.match(r"(none|no|false|off|0)\b", text):
        return [Recompute(0)]
    if stack.name == "megatron-2021" or re.search(AGAIN, cells.lower("notes")):
        return [Recompute(FULL)]  # before selective recomputation there was no other; "hardware FLOPs" tell of it
    return [Recompute(0), Recompute(own), Recompute(FULL, 0.25), Recompute(FULL, 0.5), Recompute(FULL)]


def schedule_of(cells: Cells, stack: Stack, pp: int) -> list[tuple[str, int]]:
    """Return schedules with chunks per rank: as printed, or what a tuned Megatron run may have used."""
    text = cells.lower("vpp_or_schedule")
    if pp == 1:
        return [("1f1b", 1)]
    chunks = re.search(r"v(?:p|pp|ps)?\s*[=:]?\s*(\d+)|(\d+)\s*(?:virtual|chunks)", text)
    if chunks:
        number = int(chunks.group(1) or chunks.group(2))
        return [("interleaved", number)] if 1 < number <= 64 else [("1f1b", 1)]
    if text.isdigit():
        return [("interleaved", int(text))] if 1 < int(text) <= 64 else [("1f1b", 1)]
    if "interleav" in text:
        number = re.search(r"interleav\w*\D{0,3}(\d+)", text)
        return [("interleaved", int(number.group(1)) if number and 1 < int(number.group(1)) <= 64 else 2)]
    if "zero-bubble" in text or "zero bubble" in text or re.search(r"\bzb", text):
        return [("zb-h1", 1)]
    if "gpipe" in text or "afab" in text:
        return [("gpipe", 1)]
    if "1f1b" in text or stack.name != "megatron":
        return [("1f1b", 1)]
    return [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8)]


def offload_of(cells: Cells) -> list[dict[str, Any]]:
    """Return what lives in host memory, as fields of a layout; DeepCompile offloads only as much as has to be."""
    columns = cells.lower("zero_or_fsdp", "offload", "method")
    text = f"{columns}; {cells.lower('notes')}"
    if "offload" not in text and not re.search(r"\bcpu\b", columns):
        return [{}]  # a processor that notes name is the host's
    if re.search(r"offload[a-z ]*[:=]? *(false|no\b|none|off\b)|(w/o|without|no|not) (cpu[- ]?)?offload", text):
        return [{}]
    found: dict[str, Any] = {"offload_optimizer": "cpu"}
    if re.search(r"full cpu|param", columns) or re.search(
        r"param\w*[^;,.]{0,20}offload|offload[^;,.]{0,20}param", text
    ):
        found["offload_parameters"] = "cpu"
    if "activation" in text:
        found = {**({} if "activation" in text and "optim" not in text else found), "offload_activations": "cpu"}
    if cells.lower("notes").startswith("deepcompile"):
        return [{}, *({**found, "gpu_fraction": share} for share in (0.75, 0.5, 0.25, 0.0))]
    return [found]
