"""Fused parts are compared with torch before training; torch computes the parts that differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from _telemetry import small_plan
from layouts import laid

from partool.plan.types import Plan
from partool.spec.model import ModelConfig
from partool.spec.training import KernelsSpec
from partool_kernels.glu import op
from partool_runtime.errors import ConfigurationError
from partool_runtime.fused import self_check
from partool_runtime.fused.probes import probes
from partool_runtime.mesh import Ranks

SMALL = ModelConfig(layers=1, hidden=20, ffn_hidden=44, heads=2, kv_heads=1, head_dim=10, vocab=37)
KINDS = {
    "llama": SMALL,
    "qwen": SMALL.model_copy(update={"qk_norm": True, "activation": "geglu"}),
    "layernorm": SMALL.model_copy(update={"norm": "layernorm"}),
}
PARTS = ("norm", "glu", "rope", "loss", "adamw")
CPU = torch.device("cpu")


def ranks() -> Ranks:
    """Return ranks of a world of size one."""
    world = SimpleNamespace(size=lambda: 1)
    return cast(Ranks, SimpleNamespace(device=CPU, world=world))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_pass(kind: str, dtype: torch.dtype) -> None:
    found = probes(KINDS[kind], PARTS)
    assert found.keys() == set(PARTS)
    assert {part: self_check.check(probe, CPU, dtype) for part, probe in found.items()} == dict.fromkeys(PARTS, "")


def plan(mode: str = "auto") -> Plan:
    """Return a plan that fuses norms and gated units."""
    plain = small_plan(model=SMALL, kernels=KernelsSpec(mode=mode))  # type: ignore[arg-type]
    return plain.model_copy(update={"layout": laid(plain.layout, fused=("norm", "glu"))})


def spoilt(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """Make gated units write a wrong number, or raise ``error``."""
    right = op.launch

    def launch(name: str, tensors: tuple[torch.Tensor, ...], kind: str, config: Any = None) -> None:
        if error is not None:
            raise error
        right(name, tensors, kind, config)
        tensors[-1][0, 0] += 1e-3

    monkeypatch.setattr(op, "launch", launch)


def test_what_works_stays() -> None:
    said: list[str] = []
    asked = plan()
    assert self_check.with_working_parts(asked, ranks(), said.append) is asked
    assert said == []


def test_a_wrong_kernel_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch)
    said: list[str] = []
    kept = self_check.with_working_parts(plan(), ranks(), said.append)
    assert kept.layout.derived.fused == ("norm",)
    assert len(said) == 1
    assert "glu: errors of results are" in said[0]


def test_a_kernel_that_fails_is_left_to_torch_or_ends_a_native_run(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, RuntimeError("out of resource: shared memory\nmore"))
    said: list[str] = []
    assert self_check.with_working_parts(plan(), ranks(), said.append).layout.derived.fused == ("norm",)
    assert "RuntimeError: out of resource: shared memory" in said[0]
    with pytest.raises(ConfigurationError, match="PT652: kernels differ from torch on this device: glu"):
        self_check.with_working_parts(plan("native"), ranks(), said.append)


def test_nothing_is_compared_where_torch_computes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch)
    asked = plan("torch")
    assert self_check.with_working_parts(asked, ranks(), pytest.fail) is asked
