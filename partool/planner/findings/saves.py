"""Decides whether checkpoints are written in the background, and checks that host memory holds a save."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf

from partool.diagnostics.record import Diagnostic
from partool.plan.host_memory import copied_bytes, ranks_bytes
from partool.plan.types import Plan
from partool.planner.search.price import host_room
from partool.spec.numbers import GIB
from partool.spec.targets.rules import rules_of
from partool.work.stacks import PARTOOL

_PATH = ("checkpoint", "mode")
_MARGIN = 1.1
"""Factor by which a proposed limit exceeds the prediction."""


def with_decided_mode(plan: Plan) -> tuple[Plan, list[Diagnostic]]:
    """Return the plan with ``checkpoint.mode`` decided, and the findings.

    ``auto`` becomes ``async``, which copies a rank's part of the state before it is written, if a node's memory holds
    the copies, else ``sync``. State that is in files is never copied, as it is there because memory cannot hold it.
    """
    findings: list[Diagnostic] = []
    asked = plan.checkpoint.mode
    in_background = with_mode(plan, "async")
    if plan.engine != PARTOOL.name or plan.layout.offload.optimizer == "nvme":
        chosen = with_mode(plan, "sync")
    elif asked == "sync":
        chosen = plan
    elif ranks_bytes(with_mode(plan, "sync")) > room_bytes(plan):  # too little without a save: other rules say so
        chosen = in_background if asked == "async" else with_mode(plan, "sync")
    elif ranks_bytes(in_background) <= room_bytes(plan):
        chosen = in_background
    elif asked == "auto":
        chosen, findings = with_mode(plan, "sync"), [_in_pieces(in_background)]
    else:
        chosen, findings = plan, [_too_large(in_background)]
    return chosen, [*findings, *_limit(chosen)]


def with_mode(plan: Plan, mode: str) -> Plan:
    """Return the plan with checkpoints that are written in the given mode."""
    return plan.model_copy(update={"checkpoint": plan.checkpoint.model_copy(update={"mode": mode})})


def room_bytes(plan: Plan) -> float:
    """Return the bytes of a node's memory that the ranks may take; infinite if nothing says how much there is."""
    launch, devices = plan.launch, plan.devices
    rules = rules_of(launch.target)
    limit = rules.memory_limit(launch)
    if devices.backend == "cpu":
        node = float(plan.prediction.memory.capacity_bytes * devices.per_node)
    else:
        node = host_room(devices)
    return min(node, inf if limit is None else limit[2]) - rules.memory_beside_ranks(launch, devices)


def _in_pieces(plan: Plan) -> Diagnostic:
    message = f"checkpoints are written block by block, and training waits meanwhile: {_sizes(plan)}"
    help = "state more with hardware.host_memory_gib if the nodes have it; checkpoint.mode: sync hides this note"
    return Diagnostic("PT345", message, severity="note", path=_PATH, help=help)


def _too_large(plan: Plan) -> Diagnostic:
    message = f"mode: async may end the ranks at their first save: {_sizes(plan)}"
    help = "use mode: auto, which writes block by block, or state hardware.host_memory_gib if the nodes have more"
    return Diagnostic("PT345", message, severity="warning", path=_PATH, help=help)


def _sizes(plan: Plan) -> str:
    copies, total = copied_bytes(plan, in_background=True), ranks_bytes(plan)
    ranks, room = (total - copies) / GIB, room_bytes(plan) / GIB
    return (
        f"copies of the state take {copies / GIB:.3g} GiB of a node's memory beside {ranks:.3g} GiB of the ranks, and "
        f"{room:.3g} GiB may be used"
    )


def _limit(plan: Plan) -> Iterator[Diagnostic]:
    """Warn of a limit of the user's that is below the ranks' predicted memory, copies of a save included."""
    rules = rules_of(plan.launch.target)
    limit = rules.memory_limit(plan.launch)
    if limit is None:
        return
    path, text, limit_bytes = limit
    beside = rules.memory_beside_ranks(plan.launch, plan.devices)
    need = ranks_bytes(plan) + beside
    if limit_bytes >= need:
        return
    shared = f" and {beside / GIB:.3g} GiB of /dev/shm" if beside else ""
    message = (
        f"{path[-1]}: {text} is less than what a node's {plan.devices.per_node} ranks take while they save: "
        f"{ranks_bytes(plan) / GIB:.3g} GiB{shared}"
    )
    help = f"use {ceil(_MARGIN * need / 1e9)}G or more, or drop it"
    yield Diagnostic("PT345", message, severity="warning", path=path, help=help)
