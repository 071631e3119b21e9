"""From a row to jobs and layouts that the cost model can price; what a row leaves open becomes several of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from math import gcd
from typing import Any

from partool.cost.case import RECOMPUTE
from partool.layout.stages import balance
from partool.plan.layout import DataLayout, Derived, Layout, OffloadLayout, PipelineLayout, SequenceLayout, TensorLayout
from partool.replay.cells import Cells
from partool.replay.machines import accelerator_of, devices_of, precision_of, ranks_of
from partool.replay.methods import Recompute, inexpressible, offload_of, recompute_of, schedule_of, zero_of
from partool.replay.models import dimensions_known, model_of
from partool.replay.networks import network_of
from partool.replay.stacks import NAMES, compiled, stack_of
from partool.schedule import check
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.work.stack import Stack
from partool.work.training import TrainingWork

_MOST = 48
"""Readings of one row that are tried."""
_PADS = ("megatron", "deepspeed-pipeline")
"""Code bases with Megatron's embedding, whose vocabulary is padded to a multiple of 128 per tensor rank."""
_ACCUMULATED = 8
"""Micro-batches per step that a run with offload may have if it states no batch at all: its figures are
those of a tuned batch, and one update in host memory for a single small micro-batch is the slowest choice."""
_DEFAULT_LENGTH = {"torchtitan": 8192, "torchtune": 2048}


class SkipError(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True)
class RunCase:
    """A row as the cost model reads it."""

    cells: Cells
    source: str
    sweep: tuple[str, ...]
    """Rows of one sweep differ only in their configuration."""
    options: tuple[tuple[TrainingWork, Layout], ...]
    """One reading, or several where the row leaves something open."""
    open: tuple[str, ...] = ()
    """Settings that the row does not state, in the order of :data:`OPEN`."""


@dataclass(frozen=True)
class Degrees:
    """Ranks along the axes."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int


def case_of(cells: Cells) -> RunCase:
    """Return a row as a case; raises :class:`SkipError` with the reason where it cannot be one."""
    if reason := inexpressible(cells):
        raise SkipError(f"not expressible: {reason}")
    if (name := cells.lower("stack")) and name not in NAMES:
        raise SkipError(f"unknown stack {name[:30]!r}: {', '.join(NAMES)}")
    if cells.lower("gpu") == "cpu":
        raise SkipError("not expressible: CPUs, which differ; partool calibrate measures them")
    accelerator = accelerator_of(cells)
    if accelerator is None:
        raise SkipError(f"unknown device {cells.text('gpu')[:30]!r}")
    precision = precision_of(cells, accelerator)
    if precision is None:
        raise SkipError(f"not expressible: precision {cells.text('dtype')[:20]!r} on {accelerator}")
    model = model_of(cells)
    if model is None:
        raise SkipError("the model's dimensions are unknown")
    devices = devices_of(cells, accelerator, precision)
    if devices is None:
        raise SkipError("the number of devices makes no sense")
    options = tuple(_options(cells, model, devices, precision))
    if not options:
        raise SkipError("the degrees do not fit the devices, the batch or the model")
    names = ("source", "model", "seq_len", "gpu", "n_gpus", "global_batch", "dtype")
    open = tuple(open_of(cells, devices, options))
    return RunCase(cells, cells.text("source"), tuple(cells.text(name) for name in names), options, open)


def open_of(cells: Cells, devices: Devices, options: tuple[tuple[TrainingWork, Layout], ...]) -> Iterator[str]:
    """Yield the settings that a row leaves open, though they change its price."""
    layouts = [layout for _, layout in options]
    if not dimensions_known(cells):
        yield "model"
    if not cells.count("seq_len"):
        yield "sequence_length"
    if len({layout.mesh for layout in layouts}) > 1:
        yield "degrees"
    if not cells.count("micro_batch") and len({layout.micro_batch for layout in layouts}) > 1:
        yield "micro_batch"
    if not batch_of(cells, options[0][0].sequence_length) and not accumulation_of(cells):
        yield "global_batch"
    if len({layout.recompute for layout in layouts}) > 1:
        yield "recompute"
    if len({(layout.pipeline.schedule, layout.pipeline.chunks) for layout in layouts}) > 1 or _assumed(cells, layouts):
        yield "schedule"
    if options[0][0].stack.compile_varies and compiled(cells) is None:
        yield "compile"
    network = network_of(cells.text("inter_bw_note"), devices.per_node, devices.fabric_bytes_per_s)
    if devices.nodes > 1 and (network is None or network.assumed):
        yield "network"


def _assumed(cells: Cells, layouts: list[Layout]) -> bool:
    """Return True if a row names an interleaved schedule without its chunks, or one that its numbers do not allow."""
    text = cells.lower("vpp_or_schedule").replace("1f1b", "")
    interleaved = "interleav" in text or text.isdigit() or "vp" in text
    chunks = max(layout.pipeline.chunks for layout in layouts)
    stated = re.search(r"\d+", text)
    several = interleaved and layouts[0].mesh.pp > 1
    return several and (stated is None or (int(stated.group()) > 1 and chunks == 1))


_TOKENS = (
    r"(\d[\d,]*(?:\.\d+)?)\s*([km])?[ -]tokens?\s*(?:/|per|a|each)\s*(?:global )?(?:step|batch|iteration|update)",
    r"(?:global )?batch(?: size)?(?: of| =|=|:)?\s*(?:~|about )?(\d[\d,]*(?:\.\d+)?)\s*([km])?[ -]tokens?\b",
    r"(\d+(?:\.\d+)?)\s*([km])?-tokens? (?:global )?batch",
    r"tokens? per (?:step|batch|iteration)\s*[:=]?\s*(?:~|about )?(\d[\d,]*(?:\.\d+)?)\s*([km])?\b",
)
"""Notes that state the global batch in tokens: ``4M tokens per step``."""


def batch_of(cells: Cells, length: int) -> int:
    """Return the sequences of a step: as printed, or from the tokens of a step in the notes; 0 if neither is stated.

    Tables write "4M" for 4 * 2**20 as well as for 4 million: the meaning that gives whole sequences counts.
    """
    if batch := cells.count("global_batch"):
        return batch
    for pattern in _TOKENS:
        match = re.search(pattern, cells.lower("notes"))
        if match:
            value, unit = float(match.group(1).replace(",", "")), match.group(2)
            decimal, binary = {"k": (1e3, 2**10), "m": (1e6, 2**20), None: (1, 1)}[unit]
            meanings = (value * binary / length, value * decimal / length)
            return round(next((meant for meant in meanings if meant == int(meant) > 0), max(meanings[1], 1)))
    return 0


def accumulation_of(cells: Cells) -> int:
    """Return the number of micro-batches per step that the notes state; 0 if they state none."""
    match = re.search(
        r"(?:grad(?:ient)?[ -]?accum(?:ulation)?(?: steps)?|\bga)\s*(?:[:=]|of)?\s*(\d+)|no grad\w* accum",
        cells.lower("notes"),
    )
    return int(match.group(1) or 1) if match else 0


@dataclass(frozen=True)
class Reading:
    """One way to understand a row."""

    degrees: Degrees
    schedule: tuple[str, int]
    """Name and chunks per rank."""
    recompute: Recompute
    offload: OffloadLayout
    micro_batch: int
    accumulation: int


def _options(
    cells: Cells, model: ModelConfig, devices: Devices, precision: str
) -> Iterator[tuple[TrainingWork, Layout]]:
    stack = stack_of(cells)
    usual = next((size for name, size in _DEFAULT_LENGTH.items() if name in cells.lower("source")), 4096)
    length = cells.count("seq_len") or usual
    layouts = (_layout(cells, model, stack, reading) for reading in _readings(cells, stack, devices, length))
    for layout in islice((layout for layout in layouts if layout is not None), _MOST):
        mesh = layout.mesh
        batch = layout.micro_batch * layout.derived.accumulation * mesh.dp
        vocab = -(-model.vocab // (128 * mesh.tp)) * 128 * mesh.tp if stack.name.startswith(_PADS) else None
        yield TrainingWork(model, devices, length, precision, stack, global_batch=batch, padded_vocab=vocab), layout  # type: ignore[arg-type]


def _readings(cells: Cells, stack: Stack, devices: Devices, length: int) -> Iterator[Reading]:
    for degrees in _degrees(cells, stack, devices, length):
        ways = product(schedule_of(cells, stack, degrees.pp), recompute_of(cells, stack), offload_of(cells))
        for (schedule, recompute, offload), (micro, accumulation) in product(
            ways, _batches(cells, degrees, stack, length)
        ):
            yield Reading(degrees, schedule, recompute, offload, micro, accumulation)


def _degrees(cells: Cells, stack: Stack, devices: Devices, length: int) -> Iterator[Degrees]:
    """Yield the degrees as printed; where none is and sequences are long, some ranks share a sequence."""
    ranks = devices.nodes * devices.per_node
    ranks = min(ranks, ranks_of(cells))
    printed = any(cells.number(name) for name in ("tp", "pp", "cp", "dp"))
    shares = [size for size in (1, 2, 4, 8, 16, 32, 64) if ranks % size == 0]
    if not printed and ranks > 1 and stack.name.startswith("megatron"):
        yield from (Degrees(ranks // tp, tp, 1, 1, 1) for tp in shares)
        return
    if not printed and ranks > 1 and length >= 32768:
        yield from (Degrees(ranks // cp, 1, 1, cp, 1) for cp in shares)
        return
    tp, pp, cp, ep = (cells.count(name, 1) for name in ("tp", "pp", "cp", "ep"))
    if ranks % (tp * pp * cp):
        return
    dp = ranks // (tp * pp * cp)
    yield Degrees(dp, tp, pp, cp, ep if 1 < ep <= dp * cp * tp else 1)


def _batches(cells: Cells, degrees: Degrees, stack: Stack, length: int) -> Iterator[tuple[int, int]]:
    """Yield micro-batches with their number per step; a blank global batch is one micro-batch (a few with stages)."""
    steps = accumulation_of(cells)
    batch, micro, local = batch_of(cells, length), cells.count("micro_batch"), 0
    if stack.name.startswith("fsdp2") and degrees.pp > 1 and micro > 1:
        # torchtitan's local batch goes through the pipeline in as many micro-batches as there are stages.
        local, micro = micro, max(micro // degrees.pp, 1)
    share = max(batch // degrees.dp, 1) if batch else 0
    usual = [1] if length >= 32768 else [1, 2, 4, 8]
    for size in [micro] if micro else usual:
        if share and size > share and not micro:
            continue
        if share:
            yield size, max(round(share / size), 1)
        else:
            yield size, steps or (1 if degrees.pp == 1 else local // size if local else 4 * degrees.pp)
            if not (micro or steps) and degrees.pp == 1 and "offload" in cells.lower("zero_or_fsdp"):
                yield size, _ACCUMULATED


def _layout(cells: Cells, model: ModelConfig, stack: Stack, reading: Reading) -> Layout | None:
    degrees, (name, chunks) = reading.degrees, reading.schedule
    if degrees.pp * chunks > model.layers or check(name, degrees.pp, reading.accumulation, chunks):
        if cells.number("vpp_or_schedule") is None and chunks > 1:
            return None
        name, chunks = "1f1b", 1
    if degrees.pp > model.layers or (degrees.ep > 1 and (model.moe is None or model.moe.experts % degrees.ep)):
        return None
    zero = zero_of(cells, stack, degrees.dp * degrees.cp)
    bounds = balance([1.0] * model.layers, degrees.pp * chunks)
    policies = [policy for start, stop in bounds for policy in _spread(reading.recompute, stop - start)]
    shards = degrees.dp if zero else 1
    if zero and re.search(r"hsdp|hybrid", cells.lower("zero_or_fsdp")):
        # Hybrid sharding is within a node unless a row says more.
        shards = gcd(shards, max(cells.count("gpus_per_node", 8) // degrees.tp, 1))
    layers = tuple(stop - start for start, stop in bounds)
    return Layout(
        data=DataLayout(zero=zero, shard=shards),
        tensor=TensorLayout(degree=degrees.tp, shape=(degrees.tp, 1)),
        pipeline=PipelineLayout(stages=degrees.pp, schedule=name, chunks=chunks, layers=layers),
        sequence=SequenceLayout(
            method="ulysses" if _ulysses(cells, stack) else "ring",
            degree=degrees.cp,
            order="zigzag" if stack.ring_balanced else "contiguous",
        ),
        offload=reading.offload,
        expert=degrees.ep,
        recompute=tuple(policies),
        compile="none" if stack.operators_forward > 20 else "block",
        micro_batch=reading.micro_batch,
        derived=Derived(accumulation=reading.accumulation, replicas=degrees.dp // shards),
    )


def _ulysses(cells: Cells, stack: Stack) -> bool:
    return "ulysses" in cells.everything or stack.name.startswith("deepspeed")


def _spread(recompute: Recompute, layers: int) -> list[Any]:
    some = round(recompute.share * layers)
    return [RECOMPUTE[recompute.policy]] * some + ["none"] * (layers - some)
