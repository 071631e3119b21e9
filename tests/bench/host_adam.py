"""Optimizer passes in host memory against torch's, against the traffic alone, and against DeepSpeed's cpu_adam.

Every round makes each pass once, in a different order; ratios are medians over rounds of passes in the same round.

    python tests/bench/host_adam.py [--deepspeed /tmp/ds]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import _record
import torch

from partool_kernels import isa
from partool_kernels.host import Part, Pool, StepRule, UpdatePass, sums, update

Run = Callable[[], object]
TRAFFIC = """
#include <cstdint>
// What a step reads and writes, in place, with nothing to work out.
extern "C" void traffic(float* p, float* m, float* v, const uint16_t* g, uint16_t* w, int64_t first, int64_t end) {
    for (int64_t block = first; block < end; block += 512)
        for (int64_t i = block; i < (block + 512 < end ? block + 512 : end); ++i) {
            p[i] = p[i] + 1.0f;
            m[i] = m[i] + 1.0f;
            v[i] = v[i] + 1.0f;
            w[i] = g[i] + 1;
        }
}
"""


def main() -> None:
    """Measure and write ``results/host_adam.json``."""
    options = _options()
    torch.set_num_threads(options.threads)
    arrays = Arrays(options.elements)
    pool = Pool(options.threads)
    runs = _runs(arrays, pool, options.threads) | _deepspeed_runs(options.deepspeed, options.built, arrays)
    seconds = _measure(runs, options.rounds)
    result = {
        "elements": options.elements,
        "rounds": options.rounds,
        "threads": options.threads,
        "instruction set": isa(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "milliseconds": {name: round(1e3 * statistics.median(found), 2) for name, found in seconds.items()},
        "ratios": _ratios(seconds),
    }
    _record.write("host_adam", result, "torch")


class Arrays:
    """States, gradients and weights of a given number of parameters."""

    def __init__(self, elements: int) -> None:
        draws = torch.Generator().manual_seed(0)
        self.p, self.m = torch.randn(elements, generator=draws), torch.zeros(elements)
        self.v = torch.zeros(elements)
        self.narrow = (torch.zeros(elements, dtype=torch.bfloat16), torch.zeros(elements, dtype=torch.bfloat16))
        self.g = torch.randn(elements, generator=draws).mul_(1e-2).bfloat16()
        self.h = self.g.flip(0)
        self.wide = self.g.float()
        self.w = torch.empty(elements, dtype=torch.bfloat16)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", default="", help="folder with its packages; without it, it is left out")
    parser.add_argument("--built", default="", help="folder where its compiled optimizer is kept for the next time")
    parser.add_argument("--elements", type=int, default=48_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def _runs(a: Arrays, pool: Pool, threads: int) -> dict[str, Run]:
    part, narrow = [Part(a.p, (a.m, a.v))], [Part(a.p, a.narrow)]
    rule = [StepRule("adamw", 1e-4, 0.9, 0.95, 1e-8, 0.1, 10)]
    step, before, wide = UpdatePass([a.g], rule), UpdatePass([a.h], rule), UpdatePass([a.wide], rule)
    parameter = torch.nn.Parameter(a.p)
    parameter.grad = torch.empty_like(a.p)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def torch_step(*, casts: bool) -> None:
        assert parameter.grad is not None
        if casts:
            parameter.grad.copy_(a.g)
        optimizer.step()
        if casts:
            a.w.copy_(parameter.detach())

    passes = {
        "step": lambda: update(part, step=step, weights=[a.w], pool=pool),
        "step with sums": lambda: update(part, step=step, weights=[a.w], wants_sums=True, pool=pool),
        "deferred": lambda: update(
            part, commit=before, step=step, keep=False, weights=[a.w], wants_sums=True, pool=pool
        ),
        "deferred without sums": lambda: update(part, commit=before, step=step, keep=False, weights=[a.w], pool=pool),
        "step, bf16 moments": lambda: update(narrow, step=step, weights=[a.w], pool=pool),
        "step, fp32 in place": lambda: update(part, step=wide, pool=pool),
        "sums": lambda: sums([a.g], pool=pool),
    }
    peers = {
        "torch, casts and fused": lambda: torch_step(casts=True),
        "torch, fused fp32": lambda: torch_step(casts=False),
        "traffic": _traffic(a, threads),
    }
    return passes | peers


def _traffic(a: Arrays, threads: int) -> Run:
    folder = Path(tempfile.mkdtemp(prefix="partool-bench-"))
    (folder / "traffic.cpp").write_text(TRAFFIC, encoding="utf-8")
    command = ["g++", "-O3", "-march=native", "-shared", "-fPIC", "traffic.cpp", "-o", "traffic.so"]
    subprocess.run(command, cwd=folder, check=True)
    function = ctypes.CDLL(str(folder / "traffic.so")).traffic
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 2
    function.restype = None
    places = [tensor.data_ptr() for tensor in (a.p, a.m, a.v, a.g, a.w)]
    size = len(a.p)
    cuts = [size * index // threads for index in range(threads + 1)]

    def run() -> None:
        workers = [
            threading.Thread(target=function, args=(*places, first, end)) for first, end in itertools.pairwise(cuts[1:])
        ]
        for worker in workers:
            worker.start()
        function(*places, 0, cuts[1])
        for worker in workers:
            worker.join()

    return run


def _deepspeed_runs(folder: str, built: str, a: Arrays) -> dict[str, Run]:
    if not folder:
        return {}
    import _offload_deepspeed

    built_in = Path(built) if built else Path(tempfile.mkdtemp(prefix="partool-bench-"))
    operators = _offload_deepspeed.compiled(Path(folder), built_in)
    operators.create_adam(0, 1e-4, 0.9, 0.95, 1e-8, 0.1, True, False)

    def step(*, casts: bool) -> None:
        """Step with casts as in ZeRO-Offload: fp32 gradients, possibly made by a device, and bf16 weights as output."""
        if casts:
            a.wide.copy_(a.g)
        operators.adam_update(0, 10, 1e-4, 0.9, 0.95, 1e-8, 0.1, True, a.p, a.wide, a.m, a.v)
        if casts:
            a.w.copy_(a.p)

    return {"deepspeed, fp32 in place": lambda: step(casts=False), "deepspeed, casts": lambda: step(casts=True)}


def _measure(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffles = list(runs), random.Random(0)
    for turn in range(rounds + 1):
        shuffles.shuffle(order)
        for name in order:
            begun = time.perf_counter()
            runs[name]()
            if turn > 0:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def _ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    def ratio(slower: str, faster: str) -> float:
        pairs = zip(seconds[slower], seconds[faster], strict=True)
        return round(statistics.median(one / other for one, other in pairs), 3)

    found = {
        "torch with casts / step": ratio("torch, casts and fused", "step"),
        "torch fused / step, fp32 in place": ratio("torch, fused fp32", "step, fp32 in place"),
        "traffic / step": ratio("traffic", "step"),
        "traffic / step with sums": ratio("traffic", "step with sums"),
        "deferred / step": ratio("deferred without sums", "step"),
        "deferred with sums / step with sums": ratio("deferred", "step with sums"),
        "step / step, bf16 moments": ratio("step", "step, bf16 moments"),
    }
    if "deepspeed, casts" in seconds:
        found["deepspeed / step, fp32 in place"] = ratio("deepspeed, fp32 in place", "step, fp32 in place")
        found["deepspeed with casts / step"] = ratio("deepspeed, casts", "step")
    return found


if __name__ == "__main__":
    main()
