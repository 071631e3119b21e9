"""Single kernels: their errors, and their speed next to a copy of as many bytes or a product of as many operations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from _kernels_clock import ROUNDS
from _kernels_run import Run, copy_calls, judged, product_calls

from partool_kernels.cases import case, errors
from partool_kernels.device import triton_version
from partool_kernels.registry import KERNELS, Choice, Request
from partool_kernels.registry.look_up import get
from partool_kernels.small import small

GOALS = {
    "norm_forward": 0.90, "norm_backward": 0.85, "glu_forward": 0.90, "glu_backward": 0.90,
    "rope": 0.85, "rope_norm_forward": 0.85, "rope_norm_backward": 0.85,
    "cross_entropy": 0.85, "fp8_quantise": 0.85, "onebit_pack": 0.85, "onebit_unpack": 0.85, "adamw": 0.90,
}  # fmt: skip
"""Least part of a copy's bandwidth."""
CHECKED_ROWS = 1027
TYPES = ("bfloat16", "float16", "float32")


def check(run: Run) -> dict[str, Any]:
    """Compare every kernel's results with float64: a few odd rows of typical widths, and odd widths in all types."""
    found: dict[str, float] = {}
    wrong = []
    for request in _checked(run):
        name = named(request)
        try:
            # A fresh case per request: some kernels update their inputs in place.
            error = max(errors(case(request, run.device), get(request).config))
        except Exception as failure:
            wrong.append(f"{name}: {type(failure).__name__}: {failure}".splitlines()[0])
            continue
        found[request.kernel] = max(found.get(request.kernel, 0.0), error)
        if not error <= 1:
            wrong.append(f"{name}: {error:.3g} times the error that is allowed")
        if run.late():
            run.left_out[f"checks after {name}"] = "no time left"
            break
    return {"largest_error_over_allowed": found, "wrong": wrong}


def _checked(run: Run) -> Iterator[Request]:
    for kernel, described in KERNELS.items():
        examples = [on_device(run, request) for request in described.examples(run.architecture)]
        # Triton's interpreter rounds to bfloat16 wrongly.
        types = TYPES[1:] if run.dry else TYPES
        yield from dict.fromkeys(small(each, dtype) for dtype in types for each in examples)
        if not run.dry:
            yield from (replace(each, rows=min(each.rows, CHECKED_ROWS)) for each in examples)
        if kernel not in {request.kernel for request in examples}:
            run.left_out[kernel] = f"does not run on {run.architecture}"


def on_device(run: Run, request: Request) -> Request:
    """Return the request with this device's architecture."""
    if run.dry:
        return replace(request, triton=triton_version())
    found = torch.cuda.get_device_properties(run.device)
    return replace(
        request,
        device=torch.cuda.get_device_name(run.device),
        units=int(found.multi_processor_count),
        triton=triton_version(),
    )


def named(request: Request) -> str:
    """Return a short description of a request."""
    words = [request.kernel, *request.dtypes, *request.flags, *(f"{name}={size}" for name, size in request.shape)]
    return " ".join([*words, f"rows={request.rows}"])


def huge(run: Run) -> dict[str, Any]:
    """Compare the last rows of matrices of more than 2^31 elements with those rows alone, bit by bit."""
    from partool_kernels.glu.op import glu
    from partool_kernels.norm.op import Norm, norm

    columns = run.size(16384, 64)
    rows = run.size((1 << 31) // columns + 3, 7)
    x = torch.empty(rows, columns, dtype=torch.float16, device=run.device).normal_()
    how = Norm("rms", 1e-6, torch.ones(columns, dtype=x.dtype, device=run.device), None)
    calls = {"glu": lambda x: glu(x, x, "silu"), "norm": lambda x: norm(x, how)}
    return {name: torch.equal(call(x)[-3:], call(x[-3:].clone())) for name, call in calls.items()}


def speeds(run: Run) -> dict[str, Any]:
    """Time every kernel's typical requests; one of each kernel first, in case time runs out."""
    found = {}
    columns = [[on_device(run, each) for each in KERNELS[name].examples(run.architecture)] for name in KERNELS]
    for request in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*columns))):
        result = run.attempt(named(request), lambda request=request: _speed(run, request))
        if result:
            found[named(request)] = result
    return found


def _speed(run: Run, request: Request) -> dict[str, Any]:
    kernel = KERNELS[request.kernel]
    used = small(request, "float16") if run.dry else request
    choice: Choice = get(used)
    made = case(used, run.device)
    if kernel.matrix:
        roof, flops = product_calls(run)
        work = flops / max(kernel.flops(used), 1.0)
    else:
        roof, work = copy_calls(run, kernel.moved_bytes(used)), 1.0
    (against,) = roof
    times = run.times({"ours": lambda: made.run(choice.config), "torch": made.eager, **roof}, ROUNDS)
    ratio = times.median_s[against] / times.median_s["ours"] / work
    result = {
        "time_s": times.median_s["ours"],
        "torch_s": times.median_s["torch"],
        "torch_over_ours": times.median_s["torch"] / times.median_s["ours"],
        "rounds": times.rounds,
        "config": {**choice.config.constants, "num_warps": choice.config.num_warps, "source": choice.source},
        "ratio": ratio,
        "of": against,
    }
    goal = GOALS.get(request.kernel)
    return result if goal is None else result | judged(against, ratio, goal)
