"""A CUDA or ROCm device computes what the CPU computes; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _offload_parameters_worker as shards
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from partool.spec.model import ModelConfig
from partool.spec.training import OptimizerSpec
from partool_runtime.model import Decoder
from partool_runtime.offload import Activations
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_loss, tile_networks
from partool_runtime.torch_internals.collectives import in_memory_store

CONFIG = ModelConfig(
    layers=2,
    hidden=20,
    ffn_hidden=28,
    heads=5,
    kv_heads=1,
    head_dim=4,
    vocab=37,
    window=3,
    layer_types=("sliding", "full"),
)


def trained(device: str) -> dict[str, torch.Tensor]:
    """Return the weights after five steps in float64, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Decoder(CONFIG).double().to(device)
    optimizer = DeviceOptimizer(dict(model.named_parameters()), OptimizerSpec(lr=0.01))
    for _ in range(5):
        tokens_BS = torch.randint(CONFIG.vocab, (3, 8), generator=generator)
        optimizer.clear_gradients()
        (model(tokens_BS[:, :-1].to(device), tokens_BS[:, 1:].to(device)) / 21).backward()
        optimizer.step(0.01)
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_device_equals_the_cpu() -> None:
    got, want = trained("cuda"), trained("cpu")
    for name, expected in want.items():
        assert float((got[name] - expected).abs().max()) <= 1e-12 * max(1.0, float(expected.abs().max())), name


LONG = CONFIG.model_copy(
    update={
        "layers": 6,
        "hidden": 256,
        "ffn_hidden": 704,
        "heads": 4,
        "head_dim": 64,
        "layer_types": (),
        "window": None,
    }
)
LENGTH = 4096


def long_step(policy: Any, *, tiles: int = 0, host: bool = False) -> tuple[list[torch.Tensor], int, int]:
    """Return gradients of a long sequence, the bytes on the device between the passes, and those moved to the host."""
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    model = Decoder(LONG).to(device, torch.bfloat16)
    tile_networks(model.layers, tiles)
    tile_loss(model, tiles)
    recompute(model.layers, [policy] * LONG.layers, tiled=tiles > 0)
    activations = Activations(device) if host else None
    if activations is not None:
        activations.put(dict(enumerate(model.layers)), last=LONG.layers - 1)
    tokens_BS = torch.randint(CONFIG.vocab, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        total = model(tokens_BS[:, :-1], tokens_BS[:, 1:])
        between = torch.cuda.memory_allocated() - before
        total.backward()
    torch.cuda.synchronize()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return gradients, between, activations.moved_bytes if activations is not None else 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", ["none", "keep_attention", "full"])
def test_activations_in_host_memory_change_nothing(policy: Any) -> None:
    """Over two passes: the second one's copies would spoil what it reads if they did not wait for the first's."""
    (want, whole, _), (got, less, moved) = (long_step(policy, host=host) for host in (False, True))
    for one, other in zip(got, want, strict=True):
        assert float((one - other).norm() / other.norm()) <= 1e-3  # sums of embeddings come in any order
    inputs = LENGTH * LONG.hidden * 2
    assert moved >= 2 * (LONG.layers - 1) * inputs
    # Of two layers what they save is on its way.
    assert less <= whole - (LONG.layers - 3) * inputs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tiles_change_little() -> None:
    (want, _, _), (got, _, _) = (long_step("full", tiles=tiles) for tiles in (0, 500))
    for one, other in zip(got, want, strict=True):
        assert float((one - other).norm() / other.norm()) <= 2e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parameters_in_host_memory_change_nothing(tmp_path: Path) -> None:
    """Nor in files: shards are copied on a stream of their own, which gathers wait for."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=in_memory_store(), rank=0, world_size=1, device_id=device)
    try:
        mesh = init_device_mesh("cuda", (1,))
        shards.compared(mesh)
        shards.compared(mesh, apart=True)
        shards.compared(mesh, folder=str(tmp_path))
    finally:
        dist.destroy_process_group()
