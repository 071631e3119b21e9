"""How large the tiles are in which sequences pass what needs much memory per token."""

from __future__ import annotations

from partool.spec.model import ModelConfig

LEAST_TOKENS = 1024
"""Products of fewer rows do not keep a device busy."""
LOGITS = 2**24
"""Of a tile: a quarter of what the runtime holds at once by itself."""


def network_tile(model: ModelConfig, length: int) -> int:
    """Return the tokens of a tile of a feed-forward network, for sequences of ``length`` tokens; 0: no tiles.

    As many as the model is wide, as ALST takes (arXiv 2506.13996, section 3.1): the inner tensors of a tile are then
    about as large as the weights.
    """
    tokens = max(LEAST_TOKENS, model.hidden)
    return tokens if length >= 2 * tokens else 0


def loss_tile(model: ModelConfig, length: int) -> int:
    """Return the tokens whose logits exist at once, for sequences of ``length`` tokens; 0: as the runtime does."""
    tokens = max(64, LOGITS // model.vocab)
    return tokens if length >= 2 * tokens else 0
