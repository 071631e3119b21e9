"""From a row to jobs and layouts that the cost model can price; what a row leaves open becomes several of them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from partool.cost.case import RECOMPUTE, Job
from partool.layout.stages import balance
from partool.plan.types import Layout, Mesh
from partool.schedule import check
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from replaying.cells import Cells
from replaying.machines import accelerator_of, devices_of, precision_of
from replaying.methods import Recompute, inexpressible, offload_of, recompute_of, schedule_of, stack_of, zero_of
from replaying.models import model_of

_MOST = 48
"""Readings of one row that are tried."""
_DEFAULT_LENGTH = {"torchtitan": 8192, "torchtune": 2048}


class Skip(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True)
class Case:
    """A row as the cost model reads it."""

    cells: Cells
    source: str
    sweep: tuple[str, ...]
    """Rows of one sweep differ only in their configuration."""
    options: tuple[tuple[Job, Layout], ...]
    """One reading, or several where the row leaves something open."""


@dataclass(frozen=True)
class Degrees:
    """Ranks along the axes."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int


def rows(path: Path) -> Iterator[Cells]:
    """Yield every row of a table."""
    with path.open(encoding="utf-8", newline="", errors="replace") as file:
        for values in csv.DictReader(file):
            yield Cells(
                {key: value for key, value in values.items() if isinstance(key, str) and isinstance(value, str)}
            )


def case_of(cells: Cells) -> Case:
    """Return a row as a case; raises :class:`Skip` with the reason where it cannot be one."""
    if reason := inexpressible(cells):
        raise Skip(f"not expressible: {reason}")
    accelerator = accelerator_of(cells)
    if accelerator is None:
        raise Skip(f"unknown device {cells.text('gpu')[:30]!r}")
    precision = precision_of(cells, accelerator)
    if precision is None:
        raise Skip(f"not expressible: precision {cells.text('dtype')[:20]!r} on {accelerator}")
    model = model_of(cells)
    if model is None:
        raise Skip("the model's dimensions are unknown")
    devices = devices_of(cells, accelerator, precision)
    if devices is None:
        raise Skip("the number of devices makes no sense")
    options = tuple(_options(cells, model, devices, precision))
    if not options:
        raise Skip("the degrees do not fit the devices, the batch or the model")
    names = ("source", "model", "seq_len", "gpu", "n_gpus", "global_batch", "dtype")
    return Case(cells, cells.text("source"), tuple(cells.text(name) for name in names), options)


def _options(cells: Cells, model: ModelConfig, devices: Devices, precision: str) -> Iterator[tuple[Job, Layout]]:
    stack = stack_of(cells)
    length = cells.count("seq_len") or next(
        (size for name, size in _DEFAULT_LENGTH.items() if name in cells.lower("source")), 4096
    )
    found = 0
    for degrees in _degrees(cells, devices, length):
        for schedule, recompute in product(schedule_of(cells, stack, degrees.pp), recompute_of(cells, stack)):
            for micro, accumulation in _batches(cells, degrees, stack.name, length):
                layout = _layout(
                    cells, model, degrees, schedule=schedule, recompute=recompute, batch=(micro, accumulation)
                )
                if layout is None or found >= _MOST:
                    continue
                found += 1
                batch = micro * accumulation * degrees.dp
                vocab = -(-model.vocab // (128 * degrees.tp)) * 128 * degrees.tp if "megatron" in stack.name else None
                yield Job(model, devices, length, batch, precision, stack, padded_vocab=vocab), layout  # type: ignore[arg-type]


def _degrees(cells: Cells, devices: Devices, length: int) -> Iterator[Degrees]:
    ranks = devices.nodes * devices.per_node
    ranks = min(ranks, cells.count("n_gpus", ranks))
    printed = any(cells.number(name) for name in ("tp", "pp", "cp", "dp"))
    if not printed and ranks > 1 and length >= 32768:
        # Long sequences on several devices without degrees: some of them share a sequence.
        yield from (Degrees(ranks // cp, 1, 1, cp, 1) for cp in (1, 2, 4, 8, 16, 32, 64) if ranks % cp == 0)
        return
    tp, pp, cp, ep = (cells.count(name, 1) for name in ("tp", "pp", "cp", "ep"))
    if ranks % (tp * pp * cp):
        return
    dp = ranks // (tp * pp * cp)
    yield Degrees(dp, tp, pp, cp, ep if 1 < ep <= dp * cp * tp else 1)


def _batches(cells: Cells, degrees: Degrees, stack: str, length: int) -> Iterator[tuple[int, int]]:
    """Yield micro-batches with their number per step; a blank global batch is one micro-batch (a few with stages)."""
    batch, micro = cells.count("global_batch"), cells.count("micro_batch")
    local = 0
    if stack.startswith("fsdp2") and degrees.pp > 1 and micro > 1:
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
            yield size, (1 if degrees.pp == 1 else local // size if local else 4 * degrees.pp)


def _layout(
    cells: Cells,
    model: ModelConfig,
    degrees: Degrees,
    *,
    schedule: tuple[str, int],
    recompute: Recompute,
    batch: tuple[int, int],
) -> Layout | None:
    name, chunks = schedule
    micro, accumulation = batch
    stages = degrees.pp * chunks
    if stages > model.layers or check(name, degrees.pp, accumulation, chunks):
        if name != "interleaved" or degrees.pp > model.layers:
            return None
        name, chunks, stages = "1f1b", 1, degrees.pp
        if len(schedule_of(cells, stack_of(cells), degrees.pp)) > 1:
            return None
    zero = zero_of(cells, stack_of(cells), degrees.dp)
    offload = offload_of(cells)
    if degrees.ep > 1 and (model.moe is None or model.moe.experts % degrees.ep):
        return None
    share = 1.0 if zero else 0.0
    bounds = balance([1.0] * model.layers, stages)
    some = [policy for start, stop in bounds for policy in _spread(recompute, stop - start)]
    values: dict[str, Any] = {
        "mesh": Mesh(pp=degrees.pp, dp_replicate=1 if share else degrees.dp, dp_shard=degrees.dp if share else 1, cp=degrees.cp, tp=degrees.tp),
        "expert": degrees.ep, "zero": zero, "micro_batch": micro, "accumulation": accumulation, "recompute": tuple(some),
        "compile": "none" if stack_of(cells).name.split("+")[0] in ("fsdp2", "fsdp1", "deepspeed", "megatron-2021") else "block",
        "stages": bounds, "schedule": name, "chunks": chunks,
        "sequence_method": "ulysses" if "ulysses" in cells.everything or "deepspeed" in stack_of(cells).name else "ring",
    }  # fmt: skip
    return Layout(**values, **offload)


def _spread(recompute: Recompute, layers: int) -> list[str]:
    some = round(recompute.share * layers)
    return [RECOMPUTE[recompute.policy]] * some + ["none"] * (layers - some)
