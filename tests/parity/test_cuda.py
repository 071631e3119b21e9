"""A CUDA device computes what the CPU computes; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from partool.spec.model import ModelConfig
from partool.spec.training import OptimizerSpec
from partool_runtime.model import Decoder
from partool_runtime.optim.adamw import AdamW

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
    optimizer = AdamW(dict(model.named_parameters()), OptimizerSpec(lr=0.01))
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
