"""The code base of a row: a row of the cost model's table, with what the source says otherwise."""

from __future__ import annotations

import re
from dataclasses import replace

from partool.replay.cells import Cells
from partool.strategies.engines import ENGINES
from partool.work.stack import Stack
from partool.work.stacks import STACKS, gathering_alone, own_stack, scaled_by, sending_once

_LONG = 131072
"""Tokens from which trainers that shard by ZeRO cannot hold the logits, and fuse the head with its loss."""
_OLD = ("vtrain", "sc21", "sc'21", "korthikanti", "reducing activation")
_MEGATRON_DEEPSPEED = r"megatron[-_ +/&]*deepspeed|deepspeed[-_ +/&]*megatron|bigscience|bloom\b|mt-?nlg"
"""Runs of Megatron's layers under DeepSpeed's engine, its pipeline and its ZeRO (BLOOM, arXiv 2211.05100, section 3.2;
MT-NLG, arXiv 2201.11990, section 3.1)."""
_FLASH_YEAR = 2023
"""First year in which trainers of Megatron's family had flash attention and shared norms among tensor ranks; before,
attention was unfused (Korthikanti et al., arXiv 2205.05198, and Dao et al., arXiv 2205.14135, are of May 2022)."""
UNFUSED = "+unfused"
"""Suffix of the name of a code base from before flash attention."""
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
_ASYNC_TP = r"async(?:hronous)?[- ]?(?:tp\b|tensor parallel)"
_GATHERS_ALONE = r"kempnerforge|transformers|accelerate|axolotl|\bhf\b|hugging ?face"
"""Trainers whose plan for tensor ranks has an entry per projection: KempnerForge (``kempnerforge/distributed/
tensor_parallel.py``) and Hugging Face's ``base_model_tp_plan``."""
_EIGHT_BITS = r"fp8|float8|\bf8\b"
_BLOCKWISE = (
    rf"(?:{_EIGHT_BITS})[^;,.]{{0,20}}(?:block|\b128 ?x ?128|sub-?channel)|\bfp8[-_ ]sc\b|deep-?gemm"
    rf"|(?:block[- ]?(?:wise|scal\w+)|sub-?channel)[^;,.]{{0,20}}(?:{_EIGHT_BITS})"
)
"""Words for scales per block of 128 elements; NVIDIA's recipes call them sub-channel scales (``fp8_sc``)."""
_RECIPES = r"megatron[- ]?bridge|modelzoo|model zoo|\bnemo\b|\bdgxc?\b"
_RECIPES_YEAR = 2025
"""First year of recipes with DeepEP: it was published in February 2025 (https://github.com/deepseek-ai/DeepEP)."""
_PLAIN_EXCHANGE = (
    r"\b(?:a2a|all-?to-?all) dispatcher|dispatcher[ :=]*(?:a2a|all-?to-?all|nccl)|\bno (?:deep|hybrid)-?ep"
)
_EP = r"(?:\bep\b|expert|a2a|all-?to-?all|moe)"
_EXCHANGE_BESIDE = rf"overlap\w*[^;,.]{{0,20}}{_EP}|(?:\bep|a2a|moe)[ _]\w{{0,8}}[ _]?overlap|\b1f1b[ -]?overlap"
_EXCHANGE_ALONE = rf"\b(?:no|without|w/o)\b[^;,.]{{0,12}}(?:overlap[^;,.]{{0,20}}{_EP}|{_EP}[ _-]?overlap)|overlap off"
_JAX = r"\bjax\b|maxtext|\bpaxml|axlearn|levanter|\bxla\b|t5x"
"""Trainers that XLA compiles as a whole step."""


NAMES = tuple(sorted({*STACKS, *ENGINES}))
"""Names that the column ``stack`` may hold: code bases, and training systems."""


def compiled(cells: Cells) -> bool | None:
    """Return True if a row says that its blocks are compiled, False if it says they are not, None without a word."""
    if text := cells.lower("compile"):
        return not re.match(r"no|false|0|off|-", text)
    if "compile" not in cells.everything:
        return None
    return "no compile" not in cells.everything


def stack_of(cells: Cells) -> Stack:
    """Return the code base of a run: as the column ``stack`` says, else by names that appear in the row."""
    text = cells.everything
    stack = _stated(cells) or _named(cells)
    if cells.lower("sequence_parallel").startswith(("y", "true", "1")):
        stack = replace(stack, sequence_parallel=True)
    if cells.lower("sequence_parallel").startswith(("n", "false", "0")):
        stack = replace(stack, sequence_parallel=False)
    if cells.lower("notes").startswith("deepcompile"):
        stack = replace(stack, elementwise=1.2, derate=1.05)
    if stack.name.startswith("megatron") and re.search(r"\bv100|\bt4\b", cells.lower("gpu")):
        stack = replace(stack, attention="unfused")  # flash attention needs Ampere or newer
    if re.search(_ASYNC_TP, text):
        stack = replace(stack, overlap_tensor=0.5)
    if stack.name.startswith("fsdp") and re.search(_GATHERS_ALONE, cells.lower("source")):
        stack = gathering_alone(stack)
    stack = _scaled(stack, f"{cells.lower('dtype')} {text}")
    stack = _exchanging(stack, cells, text)
    if re.search(r"cuda[ _-]?graph", text) and not re.search(r"(no|without|w/o) cuda[ _-]?graph", text):
        stack = replace(stack, host_slowdown=0.1)  # a graph starts its kernels at once
    if stack.attention == "flash2" and cells.count("year") >= 2025:
        stack = replace(stack, attention="flash3")
    if "liger" in text or (stack.name == "deepspeed" and cells.count("seq_len") >= _LONG):
        stack = replace(
            stack, name=f"{stack.name}+fused-loss", logit_bytes=8.0, elementwise=min(stack.elementwise, 1.2)
        )
    return stack


def _stated(cells: Cells) -> Stack | None:
    name = cells.lower("stack")
    if name not in NAMES:
        return None
    if name == "partool":
        return own_stack("cuda", "none" if compiled(cells) is False else "block")
    record = ENGINES.get(name)
    if record is not None:
        name = str(record.compiled if record.compiled and compiled(cells) else record.stack)
    return STACKS[name]


def _named(cells: Cells) -> Stack:
    source, text = cells.lower("source"), f"{cells.everything} {cells.lower('dtype')}"
    zero, year, pipeline = cells.used("zero_or_fsdp"), cells.count("year", 2024), cells.count("pp", 1) > 1
    if re.search(_JAX, f"{source} {text}"):
        return STACKS["jax"]
    if "torchtune" in source:
        return STACKS["torchtune"]
    if "peft" in source and "bfloat16" in text:
        # Transformers' own trainer on weights of that type: no wide copies, heads of keys repeated, the whole loss.
        return replace(STACKS["torchtune"], name="torchtune+whole-loss")
    if "torchtitan" in source or "fsdp2" in text or "torchao" in source or "titan" in source:
        return STACKS["fsdp2-compiled" if _torch_compiles(cells) else "fsdp2"]
    if "nanotron" in source or "picotron" in source:
        return STACKS["nanotron"]
    if re.search(_MEGATRON_DEEPSPEED, source) and "vtrain" not in source:
        return _megatron_deepspeed(text, zero, year)
    if any(part in source for part in _OLD):
        return STACKS["deepspeed-2021" if "zero-3" in zero else "megatron-2021"]
    if any(part in source for part in _MEGATRON):
        return STACKS["fsdp1" if "fsdp" in text and "megatron" not in text else "megatron"]
    if pipeline and "deepspeed" not in text:
        return STACKS["megatron"]
    if "deepspeed" in text or "zero-" in text or "trl" in source:
        if "megatron-lm sp" in text:
            return replace(STACKS["megatron"], attention="flash2", overlap_tensor=0.0)
        current = "deepspeed-pipeline" if pipeline else "deepspeed"
        return STACKS["deepspeed-2021" if year <= 2021 else current]
    if "fsdp" in text or "foundry" in source:
        return STACKS["fsdp1"]
    return STACKS["megatron" if re.search(r"\btp", text) else "fsdp2"]


def _exchanging(stack: Stack, cells: Cells, text: str) -> Stack:
    """Return a code base with the exchanges of experts that a row states, or that its recipes set.

    NVIDIA's recipes for models with experts (:data:`_RECIPES`) send by DeepEP or HybridEP. On machines of eight GPUs
    (H100, B200) their exchanges run beside the next micro-batch (``moe_a2a_overlap=True``); in GB200's and GB300's
    domains of 72 GPUs, where all experts are within NVLink, they do not
    (``scripts/performance/configs/deepseek/deepseek_workload_base_configs.py`` of Megatron-Bridge).
    """
    recipes = stack.name == "megatron" and cells.count("ep", 1) > 1 and _has_recipes(cells)
    plain = re.search(_PLAIN_EXCHANGE, text) is not None
    if re.search(r"deep-?ep|hybrid-?ep", text) or (recipes and not plain):
        stack = sending_once(stack)
    beside = recipes and not plain and re.search(r"\bgb[23]00", cells.lower("gpu")) is None
    if re.search(_EXCHANGE_ALONE, text):
        beside = False
    elif re.search(_EXCHANGE_BESIDE, text):
        beside = True
    return replace(stack, overlap_expert=0.6) if beside else stack


def _has_recipes(cells: Cells) -> bool:
    source = cells.lower("source")
    return re.search(_RECIPES, source) is not None and cells.count("year", 2024) >= _RECIPES_YEAR


def _torch_compiles(cells: Cells) -> bool:
    """Return True if a run of torchtitan or torchao was compiled: if it says so, or does what only the compiler does.

    Asynchronous tensor parallelism is a pass of the compiler, and eight-bit training is slower than bf16 without it
    (https://github.com/pytorch/torchtitan/blob/main/docs/float8.md), so that nobody publishes it.
    """
    if "compile" in cells.everything:
        return "no compile" not in cells.everything
    return bool(re.search(_ASYNC_TP, cells.everything) or re.search(_EIGHT_BITS, cells.lower("dtype")))


def _scaled(stack: Stack, text: str) -> Stack:
    """Return a code base with the recipe of eight-bit training that a row names."""
    if stack.name.startswith(("fsdp2", "megatron")) and re.search(_BLOCKWISE, text):
        return scaled_by(stack, "blockwise")
    if not stack.name.startswith("fsdp2"):
        return stack
    if re.search(r"row[- ]?wise", text):
        stack = scaled_by(stack, "rowwise")
    elif re.search(r"\bmx[- ]?fp8|\bmx[- ]?float8", text):
        stack = scaled_by(stack, "mx")
    if re.search(rf"(?:{_EIGHT_BITS})\d* (?:fsdp )?all-?gather", text):
        stack = replace(stack, gather_bytes=1.0)
    return stack


def _megatron_deepspeed(text: str, zero: str, year: int) -> Stack:
    """Return the code base of a run of Megatron's layers, whose engine was DeepSpeed unless the row says otherwise."""
    if "megatron only" in text:
        return STACKS["megatron-2021" if year < _FLASH_YEAR else "megatron"]
    if year >= _FLASH_YEAR:
        return STACKS["deepspeed" if "zero-3" in zero else "deepspeed-pipeline"]
    if "zero-3" in zero:
        return STACKS["deepspeed-2021"]
    stack = STACKS["deepspeed-pipeline"]
    return replace(stack, name=stack.name + UNFUSED, attention="unfused", sequence_parallel=False)
