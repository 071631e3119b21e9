"""The fused loss in partool's and transformers' models, with tiles and split backward passes; and chunk sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional as F

from partool.plan.types import HfModel
from partool.spec.model import ModelConfig
from partool_kernels.registry.chunking import WIDE_ABOVE, chunk_rows
from partool_runtime import deferral
from partool_runtime.fused.apply import put
from partool_runtime.fused.types import Fusing
from partool_runtime.hf.building import build_causal
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.sizes import model_fields
from partool_runtime.losses import set_loss
from partool_runtime.parallel.tensor.hf import HeadVocabularyLoss
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.parallel.tiling import tile_loss
from partool_runtime.weights import materialise

VOCAB, Z_LOSS = 31, 0.02
SIZES: dict[str, Any] = {
    "num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": 16, "hidden_size": 32,
    "intermediate_size": 13, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def model_of(family: str, folder: Path) -> HfDecoder:
    """Return a small float64 model of transformers with random weights; phi's output matrix has a bias."""
    config = transformers.CONFIG_MAPPING[family](**SIZES)
    config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    causal = build_causal(folder)
    fields = ModelConfig.model_validate(model_fields(causal, causal.config), strict=False)
    hf = HfModel(path=str(folder), model_type=family, architecture=type(causal).__name__)
    model = HfDecoder(hf, fields, wide=True).double()
    materialise(model, torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens_BS, labels_BS = torch.randint(VOCAB, (2, 2, 11), generator=generator).unbind()
    labels_BS[0, 2:5] = -100
    return tokens_BS, labels_BS


def formula(model: HfDecoder) -> torch.Tensor:
    tokens_BS, labels_BS = batch()
    logits_BSV = model.logits(tokens_BS)
    z_BS = logits_BSV.logsumexp(-1).square()
    total = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
    return total + Z_LOSS * z_BS[labels_BS != -100].sum()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize(("fused", "several"), [(False, False), (True, False), (True, True)])
def test_models_of_transformers(family: str, fused: bool, several: bool, tmp_path: Path) -> None:
    """With all logits at once and in tiles; gradients in the forward pass, in the backward pass, or in a split one."""
    theirs = model_of(family, tmp_path)
    wanted = formula(theirs)
    wanted.backward()
    for tile, halved in ((0, False), (4, False), (0, True), (4, True)):
        ours = model_of(family, tmp_path)
        put(ours, Fusing(("loss",) if fused else (), ours.config, several=several))
        tile_loss(ours, tile)
        set_loss(ours, z_loss=Z_LOSS)
        later: list[deferral.Work] = []
        with deferral.splitting() if halved else deferral.undivided(), deferral.collecting(later):
            total = ours(*batch())
            total.backward()
        assert bool(later) is (halved and not tile)
        for work in later:
            work()
        torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
        assert_same(ours, theirs)


@pytest.fixture
def alone() -> Iterator[Team]:
    """Sequence team of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Team(dist.group.WORLD.group_name, 0, 1, loss_tile=4)
    dist.destroy_process_group()


@pytest.mark.parametrize("several", [False, True])
def test_models_of_transformers_that_share_the_vocabulary(several: bool, alone: Team, tmp_path: Path) -> None:
    theirs, ours = (model_of("phi", tmp_path) for _ in range(2))
    wanted = formula(theirs)
    wanted.backward()
    ours.loss = HeadVocabularyLoss(alone, 0)
    put(ours, Fusing(("loss",), ours.config, several=several))
    set_loss(ours, z_loss=Z_LOSS)
    total = ours(*batch())
    total.backward()
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
    assert_same(ours, theirs)


@pytest.mark.parametrize("vocabulary", [32000, 128256, 262144])
@pytest.mark.parametrize("tokens", [8192, 16384, 65536])
def test_what_chunks_hold_is_a_tenth_of_what_torch_holds_of_all_logits(tokens: int, vocabulary: int) -> None:
    """In bf16, hidden size 4096: torch holds the logits in bf16 and fp32, and their log-softmax."""
    rows, hidden = chunk_rows(tokens, vocabulary, 2), 4096
    ours = rows * vocabulary * 2 + tokens * hidden * 2
    # The weight gradient's fp32 sum is twice as large as the bf16 gradient.
    wider = 2 * vocabulary * hidden if tokens > WIDE_ABOVE * rows else 0
    assert ours + wider <= 0.1 * tokens * vocabulary * (2 + 4 + 4)
