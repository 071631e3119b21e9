"""Ranks of test_decoder.py: the decoder in shards against the same decoder in one process, and weights from folders."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _ranks import joined
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from partool.spec.model import ModelConfig, RopeScaling, Weights
from partool_runtime.model import Decoder, decoder, loss
from partool_runtime.pieces import local_part, local_rows
from partool_runtime.weights import build, fill, freeze, materialise, post_load

SHAPES = {"layers": 2, "hidden": 13, "ffn_hidden": 22, "heads": 4, "kv_heads": 2, "head_dim": 2, "vocab": 31}
CONFIGS = {
    "untied": ModelConfig(
        **SHAPES, qkv_bias=True, window=3, layer_types=("full", "sliding"),
        rope_scaling=RopeScaling(factor=2.0, original_max_position=4),
    ),
    "tied": ModelConfig(**SHAPES, qk_norm=True, tied_embeddings=True),
    "gpt": ModelConfig(
        **SHAPES | {"kv_heads": 4}, norm="layernorm", position="learned", activation="gelu", max_position=9,
        qkv_bias=True, out_bias=True, ffn_bias=True,
    ),
}  # fmt: skip
HF = CONFIGS["untied"].model_copy(update={"rope_scaling": None})


def sharded(config: ModelConfig, policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> Decoder:  # noqa: B008
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(config).double()
    for group in model.groups()[:-1]:
        fully_shard(group, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    materialise(model, "cpu")
    return model


def whole(config: ModelConfig) -> Decoder:
    model = build(config)
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(), seed=4)
    return model


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tokens_BS = torch.randint(31, (2, 9), generator=generator)
    return tokens_BS, tokens_BS.roll(-1, 1).index_fill(1, torch.tensor([8 - rank]), -100)


def check_training(name: str) -> None:
    """Three passes each, so that hooks of an earlier one would show; the third without the embedding's gradient."""
    joined()
    ours, theirs, size = sharded(CONFIGS[name]), whole(CONFIGS[name]), dist.get_world_size()
    fill(ours, Weights(), seed=4)
    freeze(ours, ["*.attention.k.weight"])
    for chunk_logits in (10**6, 31 * 5, 31 * 5):
        decoder.loss = partial(loss, chunk_logits=chunk_logits)
        ours.zero_grad()
        theirs.zero_grad()
        total = ours(*batch(dist.get_rank()))
        (total * size).backward()  # averaged over the ranks
        dist.all_reduce(total.detach_())
        expected = sum(theirs(*batch(rank)) for rank in range(size))
        expected.backward()
        assert abs(total - expected) < 1e-12 * expected, (name, total, expected)
        for (key, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if key.endswith("attention.k.weight"):
                assert parameter.grad is None
                continue
            rows = local_rows(parameter)
            difference = (local_part(parameter.grad) - other.grad[rows.start : rows.stop]).abs()
            assert not difference.numel() or difference.max() <= 1e-12 * max(1.0, other.grad.abs().max()), (name, key)


def check_narrow() -> None:
    """Rotations stay wide where FSDP casts every floating-point argument: the tables are no argument it sees."""
    joined()
    model = sharded(CONFIGS["untied"], MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True))
    fill(model, Weights(), seed=4)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    total = model(*batch(0))
    assert total.dtype == torch.float32
    ((x_BSH, context),) = seen
    assert x_BSH.dtype == torch.bfloat16
    assert context.rope[0].dtype == torch.float32


def check_folders(folder: Path) -> None:
    joined()
    for source, config in (("hf", HF), ("checkpoint", CONFIGS["tied"])):
        model = sharded(config)
        fill(model, Weights(source=source, path=str(folder / source)), seed=99)
        post_load(model)
        for (key, parameter), other in zip(model.named_parameters(), whole(config).parameters(), strict=True):
            rows = local_rows(parameter)
            assert torch.equal(local_part(parameter), other[rows.start : rows.stop]), (source, key)
