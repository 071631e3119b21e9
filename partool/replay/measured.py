"""What a row measured, as seconds per step or bytes per device."""

from __future__ import annotations

import re

from partool.cost.training.predict import attention_flops_per_token, matmul_flops_per_token
from partool.layout.parameters import count, parameters
from partool.plan.layout import Layout
from partool.replay.cells import Cells
from partool.replay.methods import AGAIN
from partool.work.training import TrainingWork

_GIB = 2**30


def step_s(cells: Cells, job: TrainingWork, layout: Layout) -> float | None:
    """Return the seconds of the step that a job and a layout describe, or None where a row has no time.

    A time per step, or tokens per second, or FLOP/s or a share of the peak by the source's own way of counting.
    """
    seconds, ranks = cells.number("step_time_s"), layout.mesh.world_size
    if seconds is not None:
        # A layout whose micro-batches do not divide the printed batch is priced at its own batch.
        return seconds * job.global_batch / cells.count("global_batch", job.global_batch)
    if (rate := cells.number("tokens_per_s_per_gpu")) is not None:
        return job.global_batch * job.sequence_length / ranks / rate
    if (tera := cells.number("tflops_per_gpu")) is not None:
        return counted_flops(cells, job) / ranks / (tera * 1e12)
    share, peak = cells.number("mfu_pct"), job.devices.peak_flops
    if share is not None and peak:
        return counted_flops(cells, job) / ranks / (share / 100.0 * peak)
    return None


def counted_flops(cells: Cells, job: TrainingWork) -> float:
    """Return the FLOPs of a step as the source counts them: attention causal or whole, recomputation in or out."""
    text = cells.lower("notes", "source")
    tokens = job.global_batch * job.sequence_length
    if re.search(r"8\s*\*?\s*n\s*\*?\s*tokens", text):
        return 8.0 * count(parameters(job.model)) * tokens
    attention = attention_flops_per_token(job.model, job.sequence_length)
    causal = "causal" in text and "non-causal" not in text and "full attention" not in text
    # The Machine Learning Engineering book counts attention causally, and what checkpointing runs again as work.
    causal = causal or "ml-engineering" in text
    forward = matmul_flops_per_token(job.model) + attention * (1.0 if causal else 2.0)
    recomputation_counts = "ml-engineering" in text or re.search(rf"{AGAIN}|\bhfu\b printed", text)
    policy = cells.lower("recompute")
    return (4.0 if recomputation_counts and ("full" in policy or not policy) else 3.0) * tokens * forward


_PARTS = (
    (r"(?:\+|\bplus|\badd)\s*\d+(?:\.\d+)?\s*(?:bytes?|b)\s*(?:per|/|a|for each|each)\s*param",
     "bytes per parameter come on top of it"),
    (r"\bactivations?(?: memory)?(?: (?:is|are))?[ -](?:only|alone)\b|\bonly (?:the )?activations?\b"
     r"|\b(?:bars?|columns?|figures?|values?|y[- ]axis) (?:shows?|of|for|is|are|with|holds?) (?:the )?activations?\b"
     r"|\bactivation memory (?:per|of a|of one) (?:gpu|device|rank|layer)\b",
     "it is of activations alone"),
    (r"\b(?:model|optimizer|weight|parameter)s?(?: and \w+)? states? (?:only|alone)\b|\bonly (?:the )?model states\b",
     "it is of model states alone"),
    (r"\b(?:excl(?:uding|udes|\.)?|without|w/o|not counting|does not include) "
     r"(?:the )?(?:weights|parameters|model states|optimizer states?|activations)\b[^;.]{0,20}"
     r"(?:memory|peak|figure|bars?|$|[;.])",
     "parts are not in it"),
)  # fmt: skip
"""Notes that say that a figure of memory is no peak of everything, and what they say."""


def partial_peak(cells: Cells) -> str:
    """Return why a row's figure of memory is no peak of all that a run needs; empty if nothing says so."""
    text = f"{cells.lower('reading_kind')}; {cells.lower('notes')}"
    return next((reason for pattern, reason in _PARTS if re.search(pattern, text)), "")


def peak_bytes(cells: Cells) -> float | None:
    """Return the measured peak; None if there is none, or only a part of it. Tools of torch print GiB in any case."""
    value = cells.number("peak_mem_value") or cells.number("peak_mem_gib")
    unit = cells.lower("peak_mem_unit_as_printed")
    if value is None or partial_peak(cells):
        return None
    return value * (2**20 if unit.startswith(("mb", "mib")) else _GIB)


def reading(cells: Cells) -> str:
    """Return what was read: ``device`` (with the context), ``reserved`` by the allocator, or ``allocated`` from it."""
    text = cells.lower("reading_kind")
    # What is not stated is what people look at first: the tool that shows the whole device.
    if "nvidia-smi" in text or "nvml" in text or "rocm-smi" in text or "not stated" in text or not text:
        return "device"
    if "active" in text or "allocated" in text or text.strip() == "torch peak":
        return "allocated"
    return "reserved"
