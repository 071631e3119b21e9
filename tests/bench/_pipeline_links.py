"""WeiPipe against 1F1B on slow links: each rank in its own network namespace, with a link of a given rate."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch
from _pipeline_cases import Case, Found, Job, run
from _pipeline_model import RealStage, Shape, Waits, measure
from _pipeline_net import unavailable

from partool.schedule.weipipe import volume

RANKS = 4
MICRO_BATCHES = 2 * RANKS
HIDDEN = 128
RATES_MBIT = (200.0, 800.0)
TOKENS = (1024, 2048, 8192)
FASTER = 10
"""Speed of the simulated accelerator relative to the core that the layer was measured on."""


def links(quick: bool) -> dict[str, Any]:
    """Measure every sequence length at every link rate."""
    if reason := unavailable():
        print(f"links: not measured, {reason}")
        return {}
    found: list[dict[str, Any]] = []
    waits = {}
    for tokens in TOKENS[:1] if quick else TOKENS:
        shape = Shape(1, tokens, HIDDEN, RANKS)
        layer = measure(shape, 3)["layer"]
        waits[str(tokens)] = dataclasses.asdict(layer)
        for rate_mbit in RATES_MBIT[-1:] if quick else RATES_MBIT:
            found += _over(shape, layer, rate_mbit, 1 if quick else 3)
    return {"links": found, "links_layer_s": waits, "links_faster_than_measured": FASTER}


def _over(shape: Shape, layer: Waits, rate_mbit: float, rounds: int) -> list[dict[str, Any]]:
    stage = RealStage(shape, 1, RANKS, torch.float32)
    elements = sum(parameter.numel() for parameter in stage.parameters())
    waits = Waits(layer.forward_s / FASTER, layer.input_s / FASTER, layer.weight_s / FASTER)
    again = dataclasses.replace(waits, input_s=waits.input_s + waits.forward_s)
    cases = tuple(
        Case("partool", name, MICRO_BATCHES, waits=(times,) * RANKS, elements=elements, label=label)
        for name, times, label in (
            ("1f1b", again, "1F1B with recompute"),
            ("1f1b", waits, "1F1B"),
            ("weipipe", waits, "WeiPipe"),
        )
    )
    results, _ = run(Job(shape, cases, rounds=rounds), RANKS, rate_mbit)
    return [_row(result, shape, rate_mbit, results[0].median_s) for result in results]


def _row(found: Found, shape: Shape, rate_mbit: float, recomputed_s: float) -> dict[str, Any]:
    schedule = found.case.schedule(RANKS)
    if schedule.moves == "weights":
        message_bytes = 4.0 * found.case.elements
        formula_bytes = sum(volume(schedule, [message_bytes] * RANKS, [message_bytes] * RANKS))
    else:
        message_bytes = float(shape.boundary_bytes)
        sends = sum(action.kind.startswith("SEND") for actions in schedule.lists for action in actions)
        formula_bytes = sends * message_bytes
    return {
        "tokens": shape.batch * shape.length,
        "rate_mbit": rate_mbit,
        "schedule": found.case.title,
        "step_s": found.median_s,
        "of_recomputed": found.median_s / recomputed_s,
        "simulated_s": found.simulated_s(RANKS, measured=True, send_s=8e-6 * message_bytes / rate_mbit),
        "sent_bytes": statistics.median(found.sent_bytes),
        "formula_bytes": formula_bytes,
        "steps_s": found.step_s,
    }
