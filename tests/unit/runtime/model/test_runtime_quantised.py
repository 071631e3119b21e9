"""Decoders whose frozen projections are stored in few bits: parameters, sources of weights, checksums, products."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from planned import plan_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partool.layout.adapters import frozen_beside
from partool.layout.parameters import parameters
from partool.layout.quantised import stored_bytes, stored_tensors
from partool.layout.tensor import own_partition
from partool.spec.adapter import LowRank
from partool.spec.model import ModelConfig, Weights
from partool_kernels.quantised.op import QUANTISED
from partool_runtime.checkpoint import Checkpointer
from partool_runtime.dry.rank import dry_rank
from partool_runtime.errors import ConfigurationError
from partool_runtime.model import Decoder
from partool_runtime.model.projection import Linear
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tensor.apply import placements
from partool_runtime.weights import build, checksum, fill, fill_from, freeze, frozen_of, materialise, narrow, post_load
from partool_runtime.weights.draw import init_source

_SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 70, "ffn_hidden": 133, "heads": 5, "kv_heads": 5, "head_dim": 18, "vocab": 31,
    "ffn_bias": True, "out_bias": True,
}  # fmt: skip
EXPERTS = {"moe": {"experts": 3, "top_k": 2, "ffn_hidden": 9, "shared_experts": 1, "first_dense_layers": 1}}
DRY = """\
model: {layers: 2, hidden: 72, heads: 4, vocab: 256, ffn_hidden: 133}
adapter: {rank: 4, base: BASE}
hardware: {accelerator: cpu, per_node: 2}
data: python-stdlib
training: {sequence_length: 32, global_batch: 4, steps: 2, precision: bf16}
parallel: {data: {zero: 3, shard: 2}, tensor: 1, pipeline: 1, compile: none}
kernels: {mode: torch}
"""
BASES = [("int8", True), ("nf4", False), ("nf4", True)]


def config(base: str, double: bool = True, **fields: Any) -> ModelConfig:
    adapter = LowRank.model_validate({"rank": 3, "base": base, "double_quant": double})
    return ModelConfig.model_validate(_SIZES | fields | {"adapter": adapter})


def empty(model: ModelConfig, tensor: tuple[int, int] | None = None) -> Decoder:
    """Return a decoder whose base is stored as its adapter asks, without values; ``tensor`` is (rank, ranks)."""
    decoder = build(model).double()
    patterns = frozen_beside([info.name for info in parameters(model)], [])
    freeze(decoder, patterns)
    if tensor is not None:
        rank, ranks = tensor
        decoder.placements = MappingProxyType(
            placements(own_partition(model, ranks), [name for name, _ in decoder.named_parameters()], rank, ranks)
        )
        for name, parameter in list(decoder.named_parameters()):
            module, _, leaf = name.rpartition(".")
            part = torch.empty(decoder.placements[name].local_shape, dtype=parameter.dtype, device="meta")
            setattr(decoder.get_submodule(module), leaf, nn.Parameter(part, requires_grad=parameter.requires_grad))
    narrow(decoder, patterns, torch.float64)
    materialise(decoder, "cpu")
    return decoder


def filled(model: ModelConfig, tensor: tuple[int, int] | None = None) -> Decoder:
    decoder = empty(model, tensor)
    fill(decoder, Weights(), seed=3)
    post_load(decoder)
    return decoder


class Calls(TorchDispatchMode):
    """Counts products with stored matrices."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is QUANTISED
        return func(*args, **(kwargs or {}))


def base_checksum(decoder: Decoder) -> str:
    names = frozen_of(decoder, frozen_beside([info.name for info in parameters(decoder.config)], []))
    return checksum(decoder, names, None)


@pytest.mark.parametrize(("base", "double"), BASES)
def test_parameters_take_the_bytes_that_the_layout_lists(base: str, double: bool) -> None:
    decoder = filled(config(base, double, **EXPERTS))
    adapter = decoder.config.adapter
    assert adapter is not None
    shapes = {info.name: info.shape for info in parameters(decoder.config)}
    tensors = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
    for name in decoder.stored:
        projection = name.removesuffix(".weight")
        parts = [tensors[f"{projection}.{part.name}"] for part in stored_tensors(adapter, shapes[name])]
        assert sum(part.numel() * part.itemsize for part in parts) == stored_bytes(adapter, shapes[name])
        assert name not in tensors
    assert {name for name in shapes if ".weight" in name and name not in tensors} == decoder.stored.keys()
    assert "layers.1.moe.router.weight" in tensors
    assert all(module.matrix is None for module in decoder.modules() if isinstance(module, Linear))


@pytest.mark.parametrize(("base", "double"), BASES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_hold_parts_of_one_matrix(base: str, double: bool, ranks: int) -> None:
    """Whatever blocks the ranks' columns cut: the parts' numbers are those of the whole matrix."""
    model = config(base, double)
    whole = filled(model)
    parts = [filled(model, (rank, ranks)) for rank in range(ranks)]
    for name, (module, matrix) in whole.stored.items():
        numbers, covered = matrix.numbers(module), torch.zeros(module.codes.shape[0], matrix.placement.shape[1])
        for part in parts:
            mine, cut = part.stored[name]
            for box in cut.placement.boxes():
                at = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
                assert torch.equal(cut.numbers(mine)[box.local], numbers[at]), name
                covered[at] += 1
        assert bool((covered > 0).all())


def test_the_checksum_sees_codes_and_scales() -> None:
    decoder = filled(config("nf4"))
    first = base_checksum(decoder)
    assert base_checksum(filled(config("nf4"))) == first
    assert base_checksum(filled(config("nf4", False))) != first
    module, _ = decoder.stored["layers.1.ffn.down.weight"]
    for tensor in (module.codes, module.absmax, module.seconds):
        with torch.no_grad():
            values = tensor.data.view(-1)
            before = values[3 % len(values)].clone()
            values[3 % len(values)] = before + 1
            assert base_checksum(decoder) != first
            values[3 % len(values)] = before
    assert base_checksum(decoder) == first


def test_weights_come_from_a_checkpoint(tmp_path: Path) -> None:
    model = config("nf4", **EXPERTS)
    plain = Decoder(model.model_copy(update={"adapter": None})).double()
    fill_from(plain, init_source(plain.config, 3))
    writer = Checkpointer(tmp_path, keep=1, mode="sync", rank=0, world_size=1)
    writer.save(1, {f"model.{name}": parameter.detach() for name, parameter in plain.named_parameters()}, {"step": 1})
    writer.close()
    decoder = empty(model)
    fill(decoder, Weights(source="checkpoint", path=str(tmp_path)), seed=3)
    post_load(decoder)
    assert base_checksum(decoder) == base_checksum(filled(model))


@pytest.mark.parametrize(("base", "double"), BASES)
def test_weights_that_are_not_finite_are_refused(base: str, double: bool) -> None:
    def source(name: str, shape: Any, offsets: Any, sizes: Any) -> torch.Tensor:
        block = init_source(config(base), 3)(name, shape, offsets, sizes)
        if name == "layers.1.attention.q.weight":
            block[5, 7] = torch.nan
        return block

    with pytest.raises(ConfigurationError, match=r"layers\.1\.attention\.q\.weight") as error:
        fill_from(empty(config(base, double)), source)
    assert error.value.code == "PT622"


def test_unfilled_scales_are_found() -> None:
    decoder = empty(config("int8"))
    with pytest.raises(ConfigurationError, match=r"absmax"):
        post_load(decoder)


def test_recomputation_keeps_the_products() -> None:
    """With ``selective`` the results of products are kept, so that the numbers are made twice, not three times."""
    grads, calls = [], []
    for each in ("none", "selective"):
        decoder = filled(config("nf4"))
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if name.endswith("lora_b"):
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        recompute(decoder.layers, [each] * 2)
        tokens = torch.arange(14).view(2, 7)
        with Calls() as counted:
            decoder(tokens, tokens).backward()
        calls.append(counted.number)
        grads.append({name: p.grad for name, p in decoder.named_parameters() if p.requires_grad})
    # Nothing needs the gradient of the first layer's input.
    assert calls == [2 * len(decoder.stored) - 3] * 2
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_dry_run_takes_frozen_weights(base: str) -> None:
    """Without memory, as ``plan --verify`` does it; codes are gathered in fewer bytes."""
    ran = dry_rank(plan_of(DRY.replace("BASE", base)), 1)
    gathers = {each.dtype for each in ran.collectives if "gather" in each.kind}
    assert gathers == ({"bfloat16"} if base == "bf16" else {"bfloat16", "uint8"})
