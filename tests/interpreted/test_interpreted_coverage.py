"""What a plan says that its fused parts ask of kernels is what they do ask, in a training step of a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partool.plan.types import Plan
from partool.planner import make_plan
from partool.planner.kernel_parts import parts
from partool.spec import load_text
from partool_kernels import device
from partool_kernels.registry import Choice, Request
from partool_kernels.registry.look_up import get
from partool_kernels.registry.tables import bucket
from partool_runtime.fused import fuse
from partool_runtime.model import Decoder

SPEC = """\
model: {layers: 2, hidden: 24, heads: 3, kv_heads: 1, ffn_hidden: 40, vocab: 259, max_position: 64, MODEL}
hardware: {accelerator: h200, per_node: 1}
data: python-stdlib
training: {sequence_length: 10, global_batch: 2, precision: fp32}
parallel: {compile: none, recompute: none, micro_batch: 2}
kernels: {fused: [PARTS]}
"""


def planned(model: str, fused: str) -> Plan:
    loaded = load_text(SPEC.replace("MODEL", model).replace("PARTS", fused))
    assert loaded.spec is not None, loaded.diagnostics
    result = make_plan(loaded.spec, base_dir=Path(), default_name="test")
    assert result.plan is not None, result.diagnostics
    return result.plan


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        ("activation: swiglu", "norm, glu, rope, loss"),
        ("activation: geglu, qk_norm: true", "norm, glu, rope, loss"),
        ("activation: swiglu, qk_norm: true", "norm"),
        ("activation: gelu, norm: layernorm, position: learned", "norm, loss"),
    ],
)
def test_kernels_are_asked_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, model: str, fused: str) -> None:
    plan = planned(model, fused)
    called: set[tuple[object, ...]] = set()

    def recording(call: device.Call, where: torch.device) -> Choice:
        names = tuple(str(dtype).removeprefix("torch.") for dtype in call.dtypes)
        called.add((call.kernel, names, call.shape, call.rows, call.flags))
        return get(Request(call.kernel, "sm_90", names, call.shape, call.rows, call.flags))

    monkeypatch.setattr(device, "_chosen", recording)
    decoder = Decoder(plan.model)
    fuse(decoder, plan)
    tokens = torch.randint(plan.model.vocab, (2, 10))
    decoder(tokens, tokens).backward()
    said = {
        (one.request.kernel, one.request.dtypes, one.request.shape, bucket(one.request.rows), one.request.flags)
        for one in parts(plan, "")
        if one.request is not None
    }
    assert called == said, f"only called: {called - said}, only said: {said - called}"
