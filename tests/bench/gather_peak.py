"""Temporary memory growth of a rank while ZeRO-3 gathers layers: sequential against coalesced, in one run.

Two ranks over gloo run a stack of matrices of the shapes of a Llama layer; the forward pass without gradients does
nothing but gather and multiply two tokens. Two figures: torch's peak allocation, by its allocator's events, including
the copies that gloo makes of messages in flight; and the growth of the resident set, whose high-water mark is reset
before each pass (``/proc/self/clear_refs``) and which omits memory not written yet. Passes of all variants alternate.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RANKS = 2
WAYS = tuple(product(("coalesced", "sequential"), (0, 1)))
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Settings of glibc: freed blocks go back at once, so that the resident set follows the allocations."""
GOAL = 0.65


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` (current) or ``VmHWM`` (peak) of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def allocated_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes handed out by torch's allocator on this thread during a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def build(job: dict[str, Any], gather: str, depth: int) -> Any:
    """Return a sharded stack of layers that is gathered sequentially or coalesced."""
    import torch
    from torch import nn

    from partool.plan.layout import DataLayout, Derived, Layout, PipelineLayout
    from partool_runtime.mesh import build_ranks
    from partool_runtime.parallel.zero import shard

    hidden, wide = job["hidden"], job["wide"]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ParameterList(nn.Parameter(torch.ones(hidden)) for _ in range(2))
            self.square = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
            self.down = nn.Linear(wide, hidden, bias=False)

        def forward(self, x: Any) -> Any:
            for matrix in self.square:
                x = matrix(x * self.norms[0])
            return self.down(self.gate(x) * self.up(x * self.norms[1]))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(hidden, hidden, bias=False)
            self.layers = nn.ModuleList(Layer() for _ in range(job["layers"]))
            self.head = nn.Linear(hidden, 1, bias=False)

        def groups(self) -> list[list[nn.Module]]:
            return [[self.embed], *([layer] for layer in self.layers), [self.head]]

        def forward(self, x: Any) -> Any:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x) * 0.01
            return self.head(x).sum()

    layout = Layout(
        data=DataLayout(zero=3, shard=RANKS, gather=gather, prefetch=depth),
        pipeline=PipelineLayout(layers=(1,)),
        recompute=("none",),
        compile="none",
        micro_batch=1,
        derived=Derived(accumulation=1),
    )
    plan = SimpleNamespace(layout=layout, optimizer=SimpleNamespace(name="adamw"))
    ranks = build_ranks(plan, torch.device("cpu"))  # type: ignore[arg-type]
    with torch.device("meta"):
        model: Any = Model()
    shard(model, layout=layout, precision="fp32", ranks=ranks)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    return model


def rank(job: dict[str, Any], out: Path) -> None:
    """Run all variants in turn and write each one's memory."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    models = {f"{gather} {depth}": build(job, gather, depth) for gather, depth in WAYS}
    x = torch.ones(2, job["hidden"])
    found: dict[str, dict[str, list[float]]] = {
        name: {"allocated_bytes": [], "resident_bytes": [], "pass_s": []} for name in models
    }
    for round_number in range(job["rounds"] + 1):
        for name, model in models.items():
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            before, start_s = resident_bytes("VmRSS"), time.perf_counter()
            with torch.no_grad():
                model(x)
            took_s, most = time.perf_counter() - start_s, resident_bytes("VmHWM")
            model.reshard()
            torch.distributed.barrier()
            if round_number:  # the first pass allocates lasting buffers
                found[name]["resident_bytes"].append(most - before)
                found[name]["pass_s"].append(took_s)
    for name, model in models.items():
        with torch.no_grad():
            found[name]["allocated_bytes"].append(allocated_bytes(partial(model, x)))
        model.reshard()
    out.write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run the ranks; return medians over rounds for the rank that needs most, and the ratios."""
    from _start import start_ranks

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        start_ranks(Path(__file__), folder, RANKS, 600, environment=ALLOCATOR)
        ranks = [json.loads((folder / f"{index}.json").read_text(encoding="utf-8")) for index in range(RANKS)]
    ways = {
        way: {key: max(statistics.median(each[way][key]) for each in ranks) for key in found}
        for way, found in ranks[0].items()
    }
    layer = 4 * (4 * job["hidden"] ** 2 + 3 * job["hidden"] * job["wide"])
    for way in ways.values():
        way["allocated_layers"], way["resident_layers"] = (
            way[f"{kind}_bytes"] / layer for kind in ("allocated", "resident")
        )
    ratios = {
        f"prefetch {depth}": {
            key: ways[f"sequential {depth}"][key] / ways[f"coalesced {depth}"][key]
            for key in ("allocated_bytes", "resident_bytes", "pass_s")
        }
        for depth in (0, 1)
    }
    return {"job": job, "layer_bytes": layer, "ways": ways, "sequential_over_coalesced": ratios, "goal": GOAL}


def main() -> None:
    """Measure, write the result, and fail if the goal is missed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="small layers, nothing is written")
    quick = options.parse_args().quick
    job = {"hidden": 512 if quick else 1024, "wide": 1408 if quick else 2816, "layers": 4, "rounds": 3 if quick else 9}
    result = measure(job)
    if quick:
        print(json.dumps(result, indent=2))
    else:
        from _record import write

        write("gather_peak", result, "torch")
    # Without prefetching, the growth is that of a single gather, which the goal is about.
    ratios = result["sequential_over_coalesced"]["prefetch 0"]
    if max(ratios["allocated_bytes"], ratios["resident_bytes"]) > GOAL:
        sys.exit(f"sequential gathers take more than {GOAL} of coalesced ones")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
    else:
        main()
