"""Models that no table of partool knows, as users write them: each maps tokens to logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from layouts import laid
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from partool.plan.layout import Mesh
from partool.plan.types import ModuleModel, Plan
from partool.spec.model import ModelConfig
from partool.spec.model_code import module_hash


class Layer(nn.Module):
    """Grouped queries by ``repeat_interleave``; each second layer has a window, each third a bias by distance."""

    def __init__(self, number: int, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.number, self.heads, self.keys, self.head = number, heads, keys, width // heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * keys * self.head, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * 17), nn.Linear(17, width)
        self.gain = nn.Parameter(torch.full((width,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norm(x)
        q = self.q(normed).view(batch, length, self.heads, self.head).transpose(1, 2)
        k, v = self.kv(normed).view(batch, length, 2, self.keys, self.head).permute(2, 0, 3, 1, 4)
        k, v = (heads.repeat_interleave(self.heads // self.keys, dim=1) for heads in (k, v))
        at = torch.arange(length, device=x.device)
        distance = at[:, None] - at[None, :]
        if self.number % 3 == 0:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4)
        elif self.number % 3 == 1:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < 4))
        else:
            slopes = torch.arange(1, self.heads + 1, device=x.device, dtype=x.dtype)[:, None, None] / 8
            bias = (-slopes * distance.abs()).masked_fill(distance < 0, -torch.inf)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].expand(batch, -1, -1, -1))
        x = x + self.gain * self.out(y.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        # A table that is filled piece by piece, and numbers of the whole sequence.
        found = x.new_zeros(batch, length, width)
        found[..., :7] = self.down(F.silu(gate) * up)[..., :7]
        found[..., 7:] = self.down(F.silu(gate) * up)[..., 7:] * (1 + length / 40)
        return x + found / (length - 3)


class Odd(nn.Module):
    """A decoder with learned positions as a parameter, and logits from the embedding."""

    def __init__(self, width: int = 20, heads: int = 4, keys: int = 2, layers: int = 3, vocab: int = 31) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.places = nn.Parameter(0.3 * torch.randn(16, width))
        self.layers = nn.ModuleList(Layer(number, width, heads, keys) for number in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.T


class Dropped(Odd):
    """The same with dropout, which only training has."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(tokens), 0.4, self.training)


class Tied(Odd):
    """Layers that share a matrix, a vector and a module; one has no parameter of its own, one shares with the root."""

    def __init__(self, **given: Any) -> None:
        super().__init__(layers=4, **given)
        first, second, third, last = (layer for layer in self.layers if isinstance(layer, Layer))
        second.q.weight = third.q.weight = first.q.weight
        third.gain = second.gain
        third.down = second.down
        third.norm.bias = self.norm.bias
        for name, parameter in first.named_parameters():
            owner, _, own = name.rpartition(".")
            last.get_submodule(owner).register_parameter(own, parameter)


OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "odd": ("Odd", {}),
    "bytes": ("Odd", {"vocab": 257, "layers": 2}),
    "dropped": ("Dropped", {"vocab": 257, "layers": 2}),
    "tied": ("Tied", {}),
}
"""Class and keywords of each model."""


def own_model(name: str, weights: Path | None = None) -> nn.Module:
    """Return a model in float64, with the weights of a folder if one is given."""
    from safetensors.torch import load_file

    kind, config = OWN[name]
    torch.manual_seed(3)
    model: nn.Module = globals()[kind](**config).double()
    if weights is not None:
        model.load_state_dict(load_file(weights / "model.safetensors"), strict=kind != "Tied")
    return model


def write_own(name: str, folder: Path) -> None:
    """Write a model's weights."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().contiguous() for key, value in own_model(name).named_parameters()}
    save_file(state, folder / name / "model.safetensors")


def own_plan(base: Plan, name: str, mesh: Mesh, **fields: Any) -> Plan:
    """Return a plan that trains a model of this file."""
    kind, config = OWN[name]
    file = Path(__file__)
    module = ModuleModel(
        module=f"{file.stem}:{kind}", config=config, folder=str(file.parent), files={file.name: module_hash(file)}
    )
    sizes = {"layers": config.get("layers", 4 if kind == "Tied" else 3), "vocab": config.get("vocab", 31)}
    model = ModelConfig(hidden=20, ffn_hidden=17, heads=4, kv_heads=2, head_dim=5, position="none", **sizes)
    plain = {"mesh": mesh, "recompute": ("none",) * model.layers, "micro_batch": 2}
    plain |= {"stages": ((0, model.layers),), "accumulation": 4 // 2 // mesh.dp}
    layout = laid(base.layout, **(plain | fields))
    return base.model_copy(update={"model": model, "layout": layout, "module": module})
