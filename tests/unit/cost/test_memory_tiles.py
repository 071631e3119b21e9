"""Bytes that layers keep per token, measured and by the cost model's equations; tiles in plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from _alive import Alive

from partool.cost.case import FULL, RECOMPUTE, Layouts
from partool.cost.kinds import kinds
from partool.cost.memory.activations import saved_by_layer
from partool.cost.memory.stacks import memory_stack
from partool.cost.time.layer import layer
from partool.cost.training.peak import peak_memory
from partool.planner.problem import network_tile
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.work.stacks import own_stack
from partool.work.training import TrainingWork
from partool_runtime.model import Decoder
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_networks

GIB = 2**30
CPU = Devices(
    accelerator="test", backend="cpu", nodes=1, per_node=1, memory_bytes=8 * GIB, peak_flops=None,
    achievable_flops=1e11, memory_bytes_per_s=2e10, link_bytes_per_s=4e9, fabric_bytes_per_s=1e9,
)  # fmt: skip
GPU = CPU.model_copy(
    update={"backend": "cuda", "memory_bytes": 80 * GIB, "host_link_bytes_per_s": 5e10, "host_memory_bytes_per_s": 3e11}
)
TILE, SEQUENCES = 5, 2
LENGTHS = (17, 34)
KINDS: dict[str, dict[str, Any]] = {
    "gated": {"kv_heads": 1},
    "plain": {"kv_heads": 5, "activation": "gelu", "norm": "layernorm", "position": "none"},
    "windows": {"kv_heads": 5, "window": 6, "layer_types": ("sliding",) * 3},
}


def model(kind: str, layers: int) -> ModelConfig:
    sizes = {"layers": layers, "hidden": 30, "ffn_hidden": 41, "heads": 5, "head_dim": 6, "vocab": 57}
    types = {"layer_types": KINDS[kind]["layer_types"][:layers]} if "layer_types" in KINDS[kind] else {}
    return ModelConfig.model_validate(sizes | KINDS[kind] | types)


def kept_bytes(kind: str, layers: int, length: int, policy: Any, tile: int) -> int:
    """Return the bytes that a model's layers keep between forward and backward pass."""
    network = Decoder(model(kind, layers)).double()
    tile_networks(network.layers, tile)
    recompute(network.layers, [policy] * layers, tiled=tile > 0)
    x_BSH = torch.randn(SEQUENCES, length, 30, dtype=torch.float64, requires_grad=True)
    context = network.contexts(x_BSH)
    with Alive() as alive:
        for block in network.layers:
            x_BSH = block(x_BSH, context)
    return alive.live_bytes


@pytest.mark.parametrize("tile", [0, TILE])
@pytest.mark.parametrize("policy", RECOMPUTE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_keeps_per_token_what_the_equations_say(kind: str, policy: str, tile: int) -> None:
    """Bytes kept per additional token, exactly; no tensor grows with the square of the sequence length."""
    measured = []
    for length in LENGTHS:
        three, two = (kept_bytes(kind, layers, length, policy, tile) for layers in (3, 2))
        measured.append(three - two)
    job = TrainingWork(model(kind, 3), CPU, LENGTHS[0], "fp64", own_stack("cpu", "none"), global_batch=1)
    row = Layouts(micro_batch=SEQUENCES, compiled=0, mlp_tile_tokens=tile)
    wanted = saved_by_layer(job, row, memory_stack("partool"), 0, RECOMPUTE.index(policy))
    assert measured == [wanted, 2 * wanted]


LLAMA = ModelConfig(layers=32, hidden=4096, ffn_hidden=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)


def long_job(length: int = 131072) -> TrainingWork:
    """Return a job whose norms are fused: the wide tensors of others outweigh those of tiled networks."""
    return TrainingWork(LLAMA, GPU, length, "bf16", own_stack("cuda", "none", ("norm",)), global_batch=1)


def test_tiles_take_what_is_wide_out_of_the_slope() -> None:
    """When the sequence length doubles, a tiled layer's working memory grows by the narrow tensors only."""
    more = {}
    for tile in (0, 4096):
        row = Layouts(compiled=0, recompute=FULL, mlp_tile_tokens=tile, loss_tile_tokens=tile // 32)
        short, long = (peak_memory(long_job(length), row).terms for length in (131072, 262144))
        more[tile] = {name: float(long[name] - short[name]) for name in ("activations", "loss")}
        assert float(long["loss"]) > 0 or float(short["activations"]) > 0
    # Gate, up, activation and product, and gradients of three of them, each of width 14336.
    assert more[0]["activations"] - more[4096]["activations"] > 131072 * 14336 * 2 * 4
    assert more[4096]["loss"] <= more[0]["loss"]


def test_a_tile_as_long_as_the_sequence_changes_nothing() -> None:
    job, whole = long_job(4096), Layouts(compiled=0, recompute=FULL)
    tiled = Layouts(compiled=0, recompute=FULL, mlp_tile_tokens=4096)
    assert peak_memory(job, whole).terms == peak_memory(job, tiled).terms
    assert network_tile(LLAMA, 4096) == 0
    assert network_tile(LLAMA, 131072) == 4096


def test_networks_in_tiles_are_computed_once_more_at_most() -> None:
    job, kind = long_job(), kinds(LLAMA)[0]
    again = {}
    for policy in RECOMPUTE:
        for tile in (0, 4096):
            row = Layouts(compiled=0, recompute=RECOMPUTE.index(policy), mlp_tile_tokens=tile)
            again[policy, tile] = float(layer(job, row, kind).recompute.matmul_s)
    network = again["none", 4096]
    assert again["none", 0] == 0.0
    assert network > 0.0
    assert again["selective", 4096] == pytest.approx(again["selective", 0] + network)
    for policy in ("keep_attention", "full"):
        # Recomputation ends before a layer's last product, but not within tiles.
        assert again[policy, 4096] - again[policy, 0] == pytest.approx(network / 3, rel=0.05)


def test_inputs_of_layers_leave_the_device_but_for_three() -> None:
    job = long_job()
    there, moved = (peak_memory(job, Layouts(compiled=0, recompute=FULL, offload_activations=host)) for host in (0, 1))
    inputs = 131072 * 4096 * 2
    assert float(moved.host_bytes - there.host_bytes) == pytest.approx(29 * inputs)
    gone = float(np.asarray(there.terms["activations"] - moved.terms["activations"]))
    assert gone >= 0.99 * 29 * inputs


def test_what_selection_keeps_stays_on_the_device() -> None:
    """Autograd saves only the inputs of such layers; a compiled layer saves all tensors that it keeps."""
    host = {}
    for compiled in (0, 1):
        for policy in ("keep_attention", "full"):
            row = Layouts(compiled=compiled, recompute=RECOMPUTE.index(policy), offload_activations=1)
            host[compiled, policy] = float(np.asarray(peak_memory(long_job(), row).host_bytes))
    assert host[0, "keep_attention"] == host[0, "full"] == pytest.approx(host[1, "full"], rel=1e-4)
    assert host[1, "keep_attention"] > 1.9 * host[1, "full"]
