"""A plain decoder as users write it, for :mod:`graph_sequence`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BSH.shape
        heads = self.qkv(self.norm(x_BSH)).chunk(3, dim=-1)
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in heads)
        y_BNSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSH = x_BSH + self.out(y_BNSD.transpose(1, 2).reshape(batch, length, width))
        return x_BSH + self.down(F.gelu(self.up(self.norm2(x_BSH))))


class Net(nn.Module):
    """Maps tokens ``[B, S]`` to logits ``[B, S, V]``."""

    def __init__(self, width: int = 512, heads: int = 8, layers: int = 4, vocab: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embed(tokens)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        return self.head(self.norm(x_BSH))
