"""The parameter counts of presets against the model that the runtime builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from often import often

from partool.catalog.lookup import table
from partool.catalog.models import resolve_model
from partool.spec.model import ModelConfig, ModelSpec
from partool_runtime.model.decoder import Decoder


def _config(name: str) -> ModelConfig:
    config = resolve_model(ModelSpec(preset=name), Path()).config
    assert config is not None
    return config


def _distinct() -> list[str]:
    """Return one preset per shape that the runtime builds; some presets differ only in their position settings."""
    shapes: dict[str, str] = {}
    for name in table("models"):
        config = _config(name)
        if config.moe is None and config.mla is None:
            same = config.model_copy(update={"rope_theta": 1.0, "rope_scaling": None, "norm_eps": 1.0, "init_std": 1.0})
            if config.position == "rope":
                same = same.model_copy(update={"max_position": 1})
            shapes.setdefault(same.model_dump_json(), name)
    return list(shapes.values())


@pytest.mark.parametrize("name", often(_distinct(), _distinct()[::4]))
def test_the_built_model_has_the_presets_parameters(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == table("models")[name]["parameters"]
