"""The model as layouts divide it: modules that predict further tokens bring a block each, which is one layer more."""

from __future__ import annotations

from partool.spec.model import ModelConfig


class BlockModel(ModelConfig):
    """A model whose ``layers`` count every transformer block, those of predictions of further tokens included."""

    @property
    def blocks(self) -> int:
        """Number of transformer blocks."""
        return self.layers


def divided_model(model: ModelConfig) -> ModelConfig:
    """Return a model whose layers are all blocks that a layout divides; ``model`` itself where it has no others.

    Prices count layers, so each block of a prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) is one of them.
    """
    if not model.predictions:
        return model
    fields = {name: getattr(model, name) for name in ModelConfig.model_fields}
    kinds = tuple(model.attention_kind(block) for block in range(model.blocks)) if model.layer_types else ()
    return BlockModel.model_validate(fields | {"layers": model.blocks, "layer_types": kinds})
