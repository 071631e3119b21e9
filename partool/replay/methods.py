"""How a row was run: code base, ZeRO stage, schedule, recomputation, or why a spec cannot express it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from partool.cost.case import FULL, RECOMPUTE
from partool.plan.layout import OffloadLayout
from partool.replay.cells import Cells
from partool.replay.models import hybrid
from partool.replay.stacks import UNFUSED
from partool.spec.parallel import ZeroStage
from partool.strategies.schedules import SCHEDULES
from partool.work.stack import Stack

_INEXPRESSIBLE = (
    (r"\bq?lora\b|adalora|peft|dora\b|adapter|vera\b|prefix|prompt|\bia3\b|rank\d+", "tuning of few parameters"),
    (r"\bmuon\b", "the Muon optimizer"),
    (r"8-?bit adam|paged ?adam|adamw?8bit|adafactor|sgd\b|in backward|fused in(to)? backward", "another optimizer"),
    (r"v-half|v-min|zbv|dualpipe|hanayo|bitpipe|chimera", "a schedule that is not there yet"),
    (r"\bnvme\b|infinity", "states on NVMe"),
    (r"context only|bert|inference only|vision|multimodal|vlm\b", "not the training of a decoder"),
)  # fmt: skip
_READ = ("1f1b", "gpipe", "interleaved", "zb-h1")
"""Schedules of partool that rows are priced with."""
AGAIN = r"incl(\.|udes|uding|ude)? (the )?recomput|hardware flops"
"""Notes that say that FLOPs count recomputation, so there was some."""


def inexpressible(cells: Cells) -> str | None:
    """Return why no spec can say what a row did, or None."""
    text = cells.lower("method", "optimizer", "vpp_or_schedule", "zero_or_fsdp", "dtype", "model")
    for pattern, reason in _INEXPRESSIBLE:
        if re.search(pattern, text):
            return reason
    schedule = cells.lower("vpp_or_schedule")
    if schedule in SCHEDULES and schedule not in _READ:
        return f"the schedule {schedule} in a table"
    if re.search(r": \d+ layers", cells.lower("recompute")):
        return "layers that are recomputed in different ways"
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


_ZERO: tuple[tuple[str, ZeroStage], ...] = (
    (r"zero-?3|zero stage 3|full_shard", 3), (r"zero-?2|shard_grad_op", 2), (r"fsdp", 3), (r"hsdp", 3),
    (r"zero-?1|distributed optimizer|dist.?opt", 1), (r"ddp|zero-?0|none|\bno\b", 0),
)  # fmt: skip
_USUAL_ZERO: dict[str, ZeroStage] = {
    "megatron": 1, "nanotron": 1, "deepspeed": 3, "deepspeed-2021": 3, "fsdp1": 3, "fsdp2": 3, "fsdp2-compiled": 3,
    "jax": 3, "torchtune": 3,
}  # fmt: skip
"""ZeRO stages that code bases use where a row states none."""


def zero_of(cells: Cells, stack: Stack, dp: int) -> ZeroStage:
    """Return the ZeRO stage of a row: as printed, else what the code base does by itself."""
    text = cells.used("zero_or_fsdp", "method")
    if dp == 1 and "offload" not in text:
        return 0
    stated = next((stage for pattern, stage in _ZERO if re.search(pattern, text)), None)
    return _USUAL_ZERO.get(stack.name.split("+")[0], 0) if stated is None else stated


@dataclass(frozen=True)
class Recompute:
    """A policy as index of ``partool.cost.case.RECOMPUTE``, and the share of the layers that follow it."""

    policy: int
    share: float = 1.0


_CHEAP = r"moe_act|layer_?norm|mla_up|shared_experts|rope|softmax"
"""Parts of a layer that cost next to nothing to recompute (``recompute_modules`` of Megatron)."""
_RECOMPUTE = r"recomput\w*|activation checkpoint\w*|gradient checkpoint\w*|remat\w*|\bac\b"
_STATED = (
    rf"\b(full|selective|no|without)\s+(?:layer\s+|activation\s+|gradient\s+)*(?:{_RECOMPUTE})",
    rf"(?:{_RECOMPUTE})\s*(?:policy|granularity)?\s*(?:[:=]|is|was)?\s*\(?(full|selective|off|none|false|disabled|minimal|save_\w+)\b",
)
"""Notes that state a policy; "recompute not stated" states none."""


def recompute_of(cells: Cells, stack: Stack) -> list[Recompute]:
    """Return what a row recomputes: one policy if the row states it, else the policies it may have had.

    Where a row states none, it is read as a run without recomputation unless that cannot have fitted: policies come in
    the order in which they are tried.
    """
    stated = cells.lower("recompute")
    if not stated:
        notes = cells.lower("notes")
        word = next((match.group(1) for pattern in _STATED if (match := re.search(pattern, notes))), "")
        stated = "none" if word in ("no", "without", "off", "false", "disabled") else word
    selective = 2 if stack.name.startswith(("fsdp2", "jax")) else 1
    if policy := _policy(stated, selective):
        return [policy]
    if stack.name in ("megatron-2021", f"deepspeed-pipeline{UNFUSED}") or re.search(AGAIN, cells.lower("notes")):
        return [Recompute(FULL)]  # before selective recomputation there was no other; "hardware FLOPs" tell of it
    return [Recompute(0), Recompute(selective), Recompute(FULL, 0.25), Recompute(FULL, 0.5), Recompute(FULL)]


def _policy(text: str, selective: int) -> Recompute | None:
    """Return the policy that a cell states; None if it states none."""
    if text in ("attention", "keep_attention"):
        return Recompute(RECOMPUTE.index(text))
    if some := re.search(r"(\d+)\s*(?:of|/)\s*(\d+)\s*layers", text):
        return Recompute(FULL, min(int(some.group(1)) / max(int(some.group(2)), 1), 1.0))
    if re.search(r"every (2nd|second|other)|half", text):
        return Recompute(FULL, 0.5)
    if "per op" in text or "per-op" in text or re.search(r"minimal|save_(dot|qkv|out)", text):
        return Recompute(2)  # JAX's policies of this name keep the results of matrix products
    if re.match(r"(none|no|false|off|0)\b", text):
        return Recompute(0)
    if "full" in text or text in ("yes", "true", "1", "on", "ac"):
        return Recompute(FULL)
    if "select" in text:
        return Recompute(selective)
    if "core_attn" in text or "core attention" in text:
        return Recompute(1)
    return Recompute(0) if re.search(_CHEAP, text) else None


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
        named = re.search(r"interleav\w*\D{0,3}(\d+)", text)
        return [("interleaved", int(named.group(1)) if named and 1 < int(named.group(1)) <= 64 else 2)]
    if "zero-bubble" in text or "zero bubble" in text or re.search(r"\bzb", text):
        return [("zb-h1", 1)]
    if "gpipe" in text or "afab" in text:
        return [("gpipe", 1)]
    if "1f1b" in text or stack.name != "megatron":
        return [("1f1b", 1)]
    return [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8)]


def offload_of(cells: Cells) -> list[OffloadLayout]:
    """Return what lives in host memory, by each reading of the row; DeepCompile offloads only what it must."""
    columns = cells.lower("zero_or_fsdp", "offload", "method")
    text = f"{columns}; {cells.lower('notes')}"
    if "offload" not in text and not re.search(r"\bcpu\b", columns):
        return [OffloadLayout()]  # a processor that notes name is the host's
    if re.search(r"offload[a-z ]*[:=]? *(false|no\b|none|off\b)|(w/o|without|no|not) (cpu[- ]?)?offload", text):
        return [OffloadLayout()]
    offload = OffloadLayout(optimizer="cpu", gpu_fraction=0.0)
    if re.search(r"full cpu|param", columns) or re.search(
        r"param\w*[^;,.]{0,20}offload|offload[^;,.]{0,20}param", text
    ):
        offload = offload.model_copy(update={"parameters": "cpu"})
    if "activation" in text:
        offload = (offload if "optim" in text else OffloadLayout()).model_copy(update={"activations": "cpu"})
    if cells.lower("notes").startswith("deepcompile"):
        shares = (0.75, 0.5, 0.25, 0.0)
        return [OffloadLayout(), *(offload.model_copy(update={"gpu_fraction": share}) for share in shares)]
    return [offload]
