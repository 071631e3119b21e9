"""The trace of saved tensors against the tensors that autograd really saves, and against the shipped data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from partool.cost.case import Layouts
from partool.cost.training.peak import peak_memory
from partool.layout.traced import COEFFICIENTS, LATENT_WIDTHS
from partool.spec.hardware import Devices
from partool.spec.model import Mla, ModelConfig
from partool.work import traced
from partool.work.traced import TracedKind as Traced
from partool.work.training import TrainingWork
from partool_runtime import trace
from partool_runtime.model import Decoder
from partool_runtime.parallel.recompute import recompute
from partool_runtime.precision import COMPUTE_DTYPE
from partool_runtime.telemetry._memory import SavedTensors

BATCH, LENGTH = 3, 14
TOKENS = BATCH * LENGTH
SMALL: dict[str, Any] = {
    "layers": 3, "hidden": 28, "ffn_hidden": 52, "heads": 6, "kv_heads": 2, "head_dim": 10, "vocab": 37, "window": 5,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"qk_norm": True, "qkv_bias": True},
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "ffn_bias": True},
    "window": {"layer_types": ("sliding",) * 3, "activation": "relu"},
    "rows": {"layer_types": ("row",) * 3, "window": None, "grid": (2, 7)},
    "latent": {"kv_heads": 6, "mla": Mla(kv_rank=11, nope_head_dim=6, rope_head_dim=4, v_head_dim=7)},
    "latents": {"kv_heads": 6, "mla": Mla(q_rank=23, kv_rank=11, nope_head_dim=6, rope_head_dim=4, v_head_dim=7)},
}


def model(kind: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**(SMALL | KINDS[kind] | changes))


def saved_bytes(config: ModelConfig, precision: Any, policy: Any) -> int:
    """Bytes that autograd saves in a forward pass of a real model, as counted by the trainer's telemetry."""
    network = Decoder(config).to(COMPUTE_DTYPE[precision])
    recompute(network.layers, [policy] * config.layers)
    counter = SavedTensors(config.vocab, TOKENS * config.vocab, lambda: None)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    counter.start()
    total = network(tokens, tokens)
    counter.stop()
    saved = counter.live_bytes
    total.backward()
    return saved


def shipped_bytes(config: ModelConfig, precision: Any, policy: str) -> float:
    """Bytes saved by one layer according to the shipped data."""
    found = traced.coefficients(traced.shipped(), config, precision, Traced(0, policy, ()))
    assert found is not None
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    sizes = {
        "hidden": config.hidden, "query": query, "key": key, "inner": config.ffn_hidden, "heads": config.heads,
        "kv_heads": config.kv_heads, "scores": config.heads * LENGTH, "vocab": config.vocab, "one": 1,
    }  # fmt: skip
    sizes |= dict.fromkeys(LATENT_WIDTHS, 0) if config.mla is None else {
        "value": 6 * 7, "expanded": 6 * 13, "q_rank": config.mla.q_rank or 0, "kv_rank": 11, "latent": 15, "rotary": 4,
    }  # fmt: skip
    return sum(sizes[name] * size for name, size in found.token.items()) * TOKENS + found.layer


@pytest.mark.parametrize("policy", ["none", "attention", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_layer_saves_what_the_data_say(kind: str, precision: str, policy: str) -> None:
    """Exact to the byte, at odd sizes: the difference between models of three and of two layers."""
    three, two = (model(kind, layers=n, layer_types=KINDS[kind].get("layer_types", ())[:n]) for n in (3, 2))
    more = saved_bytes(three, precision, policy) - saved_bytes(two, precision, policy)
    assert more == shipped_bytes(three, precision, policy)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_attention_changes_no_gradient(kind: str) -> None:
    """The decoder's own core of attention, with and without a window, run twice: the same bits."""
    found = []
    for policy in ("none", "attention"):
        torch.manual_seed(5)
        network = Decoder(model(kind)).double()
        recompute(network.layers, [policy] * 3)
        tokens = torch.arange(TOKENS).reshape(BATCH, LENGTH) % SMALL["vocab"]
        network(tokens, tokens.roll(1)).backward()
        found.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("policy", ["none", "attention", "selective", "keep_attention", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_real_tensors_give_the_same_trace(kind: str, policy: Any) -> None:
    """Tensors cached by selective recomputation are found by lifetime, not by hooks; real and fake tensors agree."""
    grid = (8, trace.LENGTH // 8) if kind == "rows" else None
    config = model(kind, layers=2, layer_types=KINDS[kind].get("layer_types", ())[:2], grid=grid)
    case = trace.TraceCase(config, "bf16", "none", policy)
    real = trace.coefficients(trace.block_storages(case), config)
    known = traced.shipped().families
    assert tuple(real) == known[trace.family(config, "bf16", "none", policy)]
    head = trace.coefficients(trace.head_storages(case), config)
    assert tuple(head) == known[trace.head_family(config, "bf16")]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_shipped_data_are_what_this_torch_gives() -> None:
    data = traced.shipped()
    config = ModelConfig(**trace.SIZES)
    ways = ["none", "block"] if data.torch.split("+")[0] == torch.__version__.split("+")[0] else ["none"]
    found = trace.trace(trace.TraceCase(config, "bf16", way, "none") for way in ways)  # type: ignore[arg-type]
    assert {key: tuple(values) for key, values in found.items()}.items() <= data.families.items()


def test_every_kind_of_model_is_shipped() -> None:
    wanted = {trace.family(c.model, c.precision, c.compile, c.policy, c.fused) for c in trace.shipped_cases()}
    wanted |= {trace.head_family(c.model, c.precision) for c in trace.shipped_cases()}
    assert wanted == set(traced.shipped().families)


def test_the_users_model_is_traced_by_a_process() -> None:
    config = model("llama", hidden=1024, ffn_hidden=2048)
    found = traced.refresh(config, "bf16", ("none",))
    assert found.sha256 != traced.shipped().sha256
    assert found.families == traced.shipped().families


def test_other_data_change_the_memory() -> None:
    gpu = Devices(
        accelerator="test", backend="cuda", nodes=1, per_node=8, memory_bytes=2**36, peak_flops=1e15,
        achievable_flops=8e14, memory_bytes_per_s=2e12, link_bytes_per_s=4e11, fabric_bytes_per_s=5e10,
    )  # fmt: skip
    job = TrainingWork(model("llama"), gpu, 1024, "bf16", global_batch=8)
    families = {key: tuple(2 * value for value in values) for key, values in traced.shipped().families.items()}
    other = replace(job, trace=traced.Trace("0", "2000-01-01", families, "other"))
    before, after = (peak_memory(one, Layouts()).terms["activations"] for one in (job, other))
    assert after > 1.5 * before > 0


def test_failures_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="coefficients"):
        traced.parse(json.dumps({"coefficients": ["hidden"], "families": {}}))
    odd = Counter({(trace.TOKENS * 3071, 2): 1})
    with pytest.raises(trace.UnknownTensorError):
        trace.coefficients(odd, ModelConfig(**trace.SIZES))
    said = "Traceback:\n  File x\nConfigurationError: PT405 the decoder has no experts\n  help: Plan it only.\n"
    failed = subprocess.CompletedProcess([], 1, "", said)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
        with pytest.raises(
            traced.TraceError, match="model: ConfigurationError: PT405 the decoder has no experts help: Plan"
        ):
            traced.refresh(model("llama"), "bf16")
        failed.returncode, failed.stdout = 0, "no JSON"
        with pytest.raises(traced.TraceError, match="cannot be read"):
            traced.refresh(model("llama"), "fp8")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(traced.TraceError, match="nonexistent"):
        traced.refresh(model("llama"), "bf16")


def test_rare_kinds_of_latent_attention_are_not_traced() -> None:
    assert (
        traced.coefficients(traced.shipped(), model("latent", activation="gelu"), "bf16", Traced(0, "none", ())) is None
    )
    assert len(COEFFICIENTS) == len(set(COEFFICIENTS))
