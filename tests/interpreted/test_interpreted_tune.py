"""The tuner on kernels that run in the interpreter, with only the timer replaced."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from partool_kernels.compiled import Compiled
from partool_kernels.proof import Proof, ProofJob
from partool_kernels.registry import KERNELS, Config, Request
from partool_kernels.registry import kernels as registered
from partool_kernels.registry.look_up import Registry
from partool_kernels.registry.tables import stored
from partool_runtime.tune.journal import Journal
from partool_runtime.tune.machine import TuningMachine
from partool_runtime.tune.run import TuneOptions, tune
from partool_runtime.tune.search import Tools

NEEDS = Compiled(0, 16, 0, True, False)
REQUESTS = [
    Request(name, "sm_90", ("float32",), (("f", 37),), 4, ("silu",), "Fake", 8, "3.9")
    for name in ("glu_forward", "glu_backward")
]


class InTurn:
    """Timer that runs each call once and reports a shorter time for each later call of a list."""

    def __init__(self) -> None:
        self.calls = 0

    def medians_s(self, runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
        for run in runs:
            run()
        self.calls += len(runs)
        if len(runs) == 1:
            return [1.0 / self.calls]
        return [1.0 / (place + 1) for place in range(len(runs))]


def prove(jobs: Iterable[ProofJob], processes: int) -> Iterator[Proof]:
    return (Proof(job, NEEDS, ()) for job in jobs)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Config((("BLOCK", block),), 4, 1) for block in (16, 32, 64)]
    for request in REQUESTS:
        kernel = KERNELS[request.kernel]
        changed = dataclasses.replace(kernel, configs=lambda request: iter(few), default=lambda request: few[0])
        monkeypatch.setitem(registered.KERNELS, request.kernel, changed)


def tuned(folder: Path) -> list[dict[str, Any]]:
    machine = TuningMachine(torch.device("cpu"), "sm_90", "Fake", 8, "1.0", "3.9.1", InTurn())
    tools = Tools(machine, Registry(folder=folder), Journal(folder), prove=prove)
    events: list[dict[str, Any]] = []
    assert tune(REQUESTS, tools, TuneOptions(folder, budget_s=60.0), events.append)
    return events


def test_real_kernels_are_tuned_and_verified(tmp_path: Path) -> None:
    begun = time.monotonic()
    events = tuned(tmp_path)
    results = [event for event in events if event["event"] == "result"]
    assert [event["kernel"] for event in results] == ["glu_forward", "glu_backward"]
    for request in REQUESTS:
        ((answered, _, entry),) = stored(request.kernel, "sm_90", tmp_path)
        assert answered == request
        assert entry.measured is not None
        assert 0.0 <= entry.measured.error <= 1.0
        assert entry.measured.tried == 3
    assert time.monotonic() - begun < 60.0


def test_a_kernel_that_computes_the_wrong_thing_gets_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from partool_kernels.glu import cases

    right = cases.launch

    def wrong(name: str, tensors: Any, kind: str, config: Config | None = None) -> None:
        right(name, tensors, kind, config)
        tensors[-1][0, 0] += 1e-2

    monkeypatch.setattr(cases, "launch", wrong)
    events = tuned(tmp_path)
    assert [event["event"] for event in events if event["event"] in ("result", "skipped")] == ["skipped"] * 2
    assert list(stored("glu_forward", "sm_90", tmp_path)) == []
