"""Kernels combined with torch's products, compared with other implementations of the same operation.

The loss from the hidden state, linear maps in 8 bits, products of experts, the optimizer. A peer that this machine or
this version of torch lacks is reported absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from _kernels_run import Run, copy_calls, judged, product_calls
from torch.nn import functional as F

Calls = dict[str, Callable[[], Any]]
DTYPE = torch.bfloat16


def _dtype(run: Run) -> torch.dtype:
    # Triton's interpreter computes bfloat16 products wrongly.
    return torch.float32 if run.dry else DTYPE


def _absent(run: Run, calls: Calls, **others: Callable[[], Callable[[], Any] | None]) -> Calls:
    """Return the calls plus those of peers that are installed; note the absent ones."""
    found = dict(calls)
    for name, make in others.items():
        try:
            call = make()
            if call is not None:
                call()
        except Exception as error:
            run.left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if call is None:
            run.left_out[name] = "absent"
        else:
            found[name] = call
    return found


def linear_loss(run: Run) -> dict[str, Any]:
    """Loss and gradients of 16384 tokens of width 4096 among 128256: time against 6 M H V, and memory."""
    from partool_kernels.linear_cross_entropy.op import linear_cross_entropy

    tokens, width, vocabulary = run.size(16384, 21), run.size(4096, 32), run.size(128256, 77)
    dtype = _dtype(run)
    hidden = torch.randn(tokens, width, device=run.device).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=run.device) / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=run.device)

    def both_ways(loss: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(), (hidden, weight))

    def liger() -> Callable[[], Any] | None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return None if run.dry else both_ways(lambda: loss(weight, hidden, labels))

    def of_torch() -> Callable[[], Any] | None:
        loss = getattr(F, "linear_cross_entropy", None)
        return None if loss is None else both_ways(lambda: loss(hidden, weight, labels, reduction="sum"))

    def eager() -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

    calls: Calls = {"ours": both_ways(lambda: linear_cross_entropy(hidden, weight, labels)), "eager": both_ways(eager)}
    calls = _absent(run, calls, linear_cross_entropy_of_torch=of_torch, liger=liger)
    with torch.no_grad():
        first = min(tokens, 1024)
        wide = F.cross_entropy(hidden[:first].double() @ weight.double().T, labels[:first], reduction="sum")
        error = {
            "ours": float(abs(linear_cross_entropy(hidden[:first], weight, labels[:first]) / wide - 1)),
            "eager": float(
                abs(F.cross_entropy((hidden[:first] @ weight.T).float(), labels[:first], reduction="sum") / wide - 1)
            ),
        }
    # The gradient of the weight is allocated in any case.
    kept = weight.numel() * weight.element_size()
    extra = {name: run.clock.extra_bytes(call) for name, call in calls.items()}
    product, flops = product_calls(run)
    times = run.times(calls | product)
    floor_s = times.median_s["product"] * 6.0 * tokens * width * vocabulary / flops
    result = {
        "times_s": times.median_s,
        "rounds": times.rounds,
        "floor_6mhv_s": floor_s,
        "over_floor": times.median_s["ours"] / floor_s,
        "goal_over_floor": 1.15,
        "met": times.median_s["ours"] <= 1.15 * floor_s,
        "extra_bytes": extra,
        "relative_error_of_loss": error,
        "faster_than": {name: time_s / times.median_s["ours"] for name, time_s in times.median_s.items()},
    }
    if extra["ours"] is not None and extra["eager"] is not None:
        part = (extra["ours"] - kept) / max(extra["eager"] - kept, 1)
        result["memory_without_weight_gradient"] = {"of_eager": part, "goal": 0.1, "met": part <= 0.1}
    return result


def fp8_linear(run: Run) -> dict[str, Any]:
    """One linear map forward and backward in 8 bits, narrowing included, against bfloat16."""
    from partool_kernels.fp8_linear import fp8_linears
    from partool_kernels.registry import ARCHITECTURES

    name = ARCHITECTURES[run.architecture].fp8
    if name is None:
        raise NotImplementedError(f"{run.architecture} has no 8-bit products")
    found = {}
    for inputs, outputs in ((4096, 4096), (4096, 14336), (14336, 4096)):
        rows, k, n = run.size(16384, 5), run.size(inputs, 40), run.size(outputs, 36)
        x = torch.randn(rows, k, device=run.device).to(_dtype(run)).requires_grad_()
        weight = (torch.randn(n, k, device=run.device) / k**0.5).to(_dtype(run)).requires_grad_()
        grad = torch.randn(rows, n, device=run.device).to(_dtype(run))

        def ours(x: torch.Tensor = x, weight: torch.Tensor = weight, grad: torch.Tensor = grad) -> Any:
            (out,) = fp8_linears(x, [weight], getattr(torch, name))
            return torch.autograd.grad(out, (x, weight), grad)

        def wide(x: torch.Tensor = x, weight: torch.Tensor = weight, grad: torch.Tensor = grad) -> Any:
            return torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

        times = run.times({"ours": ours, "bf16": wide})
        found[f"{rows} x {k} to {n}"] = {"times_s": times.median_s, "rounds": times.rounds} | judged(
            "bf16", times.median_s["bf16"] / times.median_s["ours"], 1.35
        )
    return found


def optimizer(run: Run) -> dict[str, Any]:
    """AdamW of a model's worth of parameters against torch's fused one and a copy of as many bytes."""
    from partool_kernels.adamw.op import Tensors, Update, adamw

    size, pieces = run.size(1 << 24, 65), run.size(32, 2)

    def some() -> list[torch.Tensor]:
        return [torch.rand(size, device=run.device) for _ in range(pieces)]

    own = Tensors(some(), some(), some(), some(), (True,) * pieces)
    update = Update(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, scale=1.0, step=10)
    theirs = [torch.nn.Parameter(x) for x in some()]
    for parameter in theirs:
        parameter.grad = torch.rand_like(parameter)
    fused = torch.optim.AdamW(theirs, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    calls: Calls = {"ours": lambda: adamw(own, update), "torch_fused": fused.step}
    times = run.times(calls | dict(copy_calls(run, 28.0 * size * pieces)))
    found = {"times_s": times.median_s, "rounds": times.rounds, "parameters": size * pieces}
    found |= judged("copy", times.median_s["copy"] / times.median_s["ours"], 0.90)
    return found | {"over_torch_fused": times.median_s["torch_fused"] / times.median_s["ours"]}


def attention(run: Run) -> dict[str, Any]:
    """Causal attention forward and backward: the selector's choice against the fastest one it measured."""
    from partool_kernels.select.attention import HeadSizes, attention, by, newer, plain
    from partool_kernels.select.selector import Selector

    found = {}
    for heads in (HeadSizes(2, 32, 8, 8192, 128), HeadSizes(8, 32, 8, 2048, 64)):
        used = HeadSizes(1, 2, 1, 16, 8) if run.dry else heads
        dtype = _dtype(run)
        attend, answer = attention(Selector(run.clock.timer), used, dtype, run.device, also=newer(run.device))
        q, k, v = (
            torch.randn(used.batch, count, used.length, used.width, device=run.device, dtype=dtype, requires_grad=True)
            for count in (used.queries, used.keys, used.keys)
        )
        grad = torch.randn_like(q)

        def both(core: Callable[..., torch.Tensor], q: Any = q, k: Any = k, v: Any = v, grad: Any = grad) -> Any:
            return lambda: torch.autograd.grad(core(q, k, v), (q, k, v), grad)

        # Implementations enabled for the whole process appear in the selector's own figures only.
        rest = [name for name in answer.seconds if name not in {answer.name, *newer(run.device)}]
        calls: Calls = {"chosen": both(attend), "torch": both(plain)} | {name: both(by(name)) for name in rest}
        times = run.times(calls)
        others = min(time_s for name, time_s in times.median_s.items() if name != "chosen")
        found[str(tuple(used))] = {
            "chosen": answer.name,
            "measured_s": answer.seconds,
            "excluded": answer.excluded,
            "times_s": times.median_s,
            "rounds": times.rounds,
        } | judged("best other", others / times.median_s["chosen"], 0.98)
    return found


def experts(run: Run) -> dict[str, Any]:
    """Products of eight experts with uneven numbers of rows, against one dense product of as many operations."""
    from partool_kernels.grouped_gemm.op import grouped_gemm

    count, k, n = 8, run.size(4096, 24), run.size(14336, 40)
    shares = [run.size(256, 1) * part for part in (1, 3, 5, 7, 9, 11, 13, 15)]
    dtype, rows = _dtype(run), sum(shares)
    ends = torch.tensor(shares, device=run.device).cumsum(0)
    x = torch.randn(rows, k, device=run.device).to(dtype)
    weights = (torch.randn(count, k, n, device=run.device) / k**0.5).to(dtype)

    def of_torch() -> Callable[[], Any] | None:
        grouped = getattr(F, "grouped_mm", None)
        return None if grouped is None or run.dry else lambda: grouped(x, weights, offs=ends.int())

    calls: Calls = {"triton": lambda: grouped_gemm(x, weights, ends), "dense": lambda: x @ weights[0]}
    calls = _absent(run, calls, grouped_mm_of_torch=of_torch)
    times = run.times(calls)
    found = {"times_s": times.median_s, "rounds": times.rounds, "rows": shares}
    best = min(time_s for name, time_s in times.median_s.items() if name != "dense")
    return found | judged("dense", times.median_s["dense"] / best, 0.85)


def host(run: Run) -> dict[str, Any]:
    """Host time of one call: small layers are bound by it, not by the device."""
    from partool_kernels.glu.op import glu
    from partool_kernels.norm.op import Norm, norm

    calls_of_each = run.size(300, 1)
    x = torch.randn(4, 64, device=run.device).to(_dtype(run))
    how = Norm("rms", 1e-6, torch.ones(64, device=run.device, dtype=x.dtype))
    calls: Calls = {
        "glu": lambda: glu(x, x, "silu"),
        "glu of torch": lambda: F.silu(x) * x,
        "norm": lambda: norm(x, how),
        "norm of torch": lambda: F.rms_norm(x, (64,), how.weight, 1e-6),
    }
    found = {}
    for name, call in calls.items():
        call()
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(calls_of_each):
            call()
        found[f"{name}, s per call"] = (time.perf_counter() - start_s) / calls_of_each
    return found


PEERS = {
    "linear_loss": linear_loss,
    "fp8_linear": fp8_linear,
    "optimizer": optimizer,
    "attention": attention,
    "experts": experts,
    "host": host,
}
"""Measurements by name."""
