"""Models of transformers attend through partool's seam, so that every method of sequence parallelism fits them."""

from __future__ import annotations

from partool.plan.types import Plan
from partool_runtime.hf.attention import HfBlock, take
from partool_runtime.hf.model import HfDecoder, HfPart
from partool_runtime.hf.stages import HfParts
from partool_runtime.model.attention import attention_layout
from partool_runtime.model.decoder import Contexts


def take_attention(model: HfPart, plan: Plan) -> list[HfBlock]:
    """Let a rank's layers attend through the seam, and passes tell which tokens they hold; in place.

    Return what stands for the layers, in their order. Comes after tensor parallelism.
    """
    config = plan.model
    if isinstance(model, HfParts):
        layers = dict(model.blocks())
        bases = [stage.base for stage in model.stages.values()]
    elif isinstance(model, HfDecoder):
        layers = dict(enumerate(model.layers))
        bases = [model.base]
    else:
        raise TypeError(type(model).__name__)
    windows = {number: attention_layout(config, number).window for number in layers}
    found = take(bases, layers, windows)
    for part in model.stages.values() if isinstance(model, HfParts) else [model]:
        part.contexts = Contexts(config)
    return [found[number] for number in layers]
