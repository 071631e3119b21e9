"""Kernel requests that a plan predicts for its fused parts are those that a training step of a small model makes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import astuple

import pytest
import torch
from planned import plan_of

from partool.plan.types import Plan
from partool.planner.kernels.parts import parts
from partool.planner.kernels.requests import KernelUse, asked
from partool_kernels import device
from partool_kernels.registry import Choice, Request
from partool_kernels.registry.look_up import get
from partool_kernels.registry.tables import bucket
from partool_runtime.fp8 import use_fp8
from partool_runtime.fused import fuse
from partool_runtime.model import Decoder
from partool_runtime.parallel.recompute import recompute

SPEC = """\
model: {layers: 2, hidden: 24, heads: 3, kv_heads: 1, ffn_hidden: 40, vocab: 259, max_position: 64, MODEL}
hardware: {accelerator: h200, per_node: 1}
data: python-stdlib
training: {sequence_length: 10, global_batch: 2, precision: fp32}
parallel: {compile: none, recompute: none, micro_batch: 2}
kernels: {fused: [PARTS]}
"""


def planned(model: str, fused: str, *overrides: str) -> Plan:
    return plan_of(SPEC.replace("MODEL", model).replace("PARTS", fused), *overrides)


def asked_of_kernels(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> dict[tuple[object, ...], float]:
    """Run a step of the plan's model on the CPU; return how often each kernel request is looked up, rows by bucket."""
    called: Counter[tuple[object, ...]] = Counter()

    def recording(call: device.KernelCall, where: torch.device) -> Choice:
        names = tuple(str(dtype).removeprefix("torch.") for dtype in call.dtypes)
        called[call.kernel, names, call.shape, call.rows, call.flags] += 1
        return get(Request(call.kernel, "sm_90", names, call.shape, call.rows, call.flags))

    monkeypatch.setattr(device, "_chosen", recording)
    decoder = Decoder(plan.model)
    if plan.training.precision == "fp8":
        decoder.bfloat16()
        use_fp8(decoder.layers, plan, torch.device("cpu"))
    fuse(decoder, plan)
    recompute(decoder.layers, list(plan.layout.recompute))
    tokens = torch.randint(plan.model.vocab, (2, 10))
    decoder(tokens, tokens).backward()
    return dict(called)


def said(found: Iterable[KernelUse]) -> dict[tuple[object, ...], float]:
    counts: dict[tuple[object, ...], float] = defaultdict(float)
    for one in found:
        if one.request is not None and not one.library:
            kernel, _, types, shape, rows, flags, *_ = astuple(one.request)
            counts[kernel, types, shape, bucket(rows), flags] += one.calls
    return dict(counts)


@pytest.mark.parametrize(
    ("model", "fused", "policy"),
    [
        ("activation: swiglu", "norm, glu, rope, loss", "selective"),
        ("activation: geglu, qk_norm: true", "rope, loss", "none"),
        ("activation: swiglu, qk_norm: true", "norm", "attention"),
        ("activation: gelu, norm: layernorm, position: learned", "norm", "full"),
    ],
)
def test_kernels_are_asked_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, model: str, fused: str, policy: str
) -> None:
    plan = planned(model, fused, f"parallel.recompute={policy}")
    assert asked_of_kernels(monkeypatch, plan) == said(parts(plan, ""))


def test_products_and_conversions_in_8_bits_are_asked_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = ("model.hidden=48", "model.ffn_hidden=80", "model.layers=1")
    plan = planned("activation: swiglu", "", "training.precision=fp8", "parallel.recompute=full", *widths)
    assert asked_of_kernels(monkeypatch, plan) == said((*asked(plan, ""), *parts(plan, "")))
