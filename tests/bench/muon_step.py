"""Seconds of Muon's step on one CPU rank, against ``torch.optim.Muon``; steps alternate, CPU seconds too."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _record import write
from torch import nn

from partool.layout.matrices import MatrixStack
from partool.spec.training import OptimizerSpec
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.optim.muon import WholeMatrices

SHAPES = [(384, 384), (384, 384), (1024, 384), (384, 1024)] * 2
ROUNDS = 9


def parameters() -> dict[str, nn.Parameter]:
    """Return the same matrices each time."""
    random = torch.Generator().manual_seed(0)
    return {f"{number}.weight": nn.Parameter(torch.randn(*s, generator=random)) for number, s in enumerate(SHAPES)}


def main() -> None:
    """Measure in alternation and write medians and their ratio."""
    torch.set_num_threads(1)
    ours, theirs = parameters(), parameters()
    spec = OptimizerSpec(name="muon", lr=1e-3, momentum=0.95)
    stacks = [MatrixStack(name, 1, *p.shape) for name, p in ours.items()]
    mine = DeviceOptimizer(ours, spec, matrices=WholeMatrices(stacks, spec.newton_schulz))
    torchs = torch.optim.Muon(
        list(theirs.values()), lr=1e-3, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    random = torch.Generator().manual_seed(1)
    found: dict[str, list[tuple[float, float]]] = {"partool": [], "torch": []}
    for number in range(ROUNDS + 2):
        for name, one in ours.items():
            one.grad = torch.randn(one.shape, generator=random)
            theirs[name].grad = one.grad.clone()
        sides: list[tuple[str, Any]] = [("partool", lambda: mine.step(1e-3)), ("torch", torchs.step)]
        for side, step in sides if number % 2 else reversed(sides):
            begin = time.perf_counter(), time.process_time()
            step()
            if number >= 2:
                found[side].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    medians = {
        side: {"step_s": statistics.median(a for a, _ in rows), "cpu_s": statistics.median(b for _, b in rows)}
        for side, rows in found.items()
    }
    ratios = [a[1] / b[1] for a, b in zip(found["partool"], found["torch"], strict=True)]
    result = {"rounds": ROUNDS, "medians": medians, "cpu_ratio": statistics.median(ratios), "goal_ratio": 1.05}
    write("muon_step", result, "torch")


if __name__ == "__main__":
    main()
