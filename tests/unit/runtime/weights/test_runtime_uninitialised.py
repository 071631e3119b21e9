"""No loss depends on uninitialised memory: every container of a model, with all new memory full of NaN."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from partool.plan.layout import Mesh
from partool.plan.types import HfModel
from partool.spec.model import ModelConfig, Weights
from partool_runtime.data.batches import MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.stages import HfParts
from partool_runtime.hf.structure import describe
from partool_runtime.mesh import build_ranks
from partool_runtime.model import AnyDecoder, DecoderParts
from partool_runtime.parallel.weipipe.parts import RingDecoder
from partool_runtime.preparation import prepare
from partool_runtime.weights import build, build_parts, fill, materialise, post_load

sys.path.insert(0, str(Path(__file__).parents[3] / "parity"))
from _hf_models import MODELS, plan_of, write_model
from _plans import small_plan

SPANS = ((0, 1), (1, 2), (2, 3), (3, 4))
FOLDED = ((0, 3), (1, 2))
"""Stages of two ranks, one of which has the first and last: ZB-V, Hanayo, an interleaved schedule of one rank."""
TOKENS_BS = torch.arange(12).reshape(2, 6) * 5 % 31
LABELS_BS = TOKENS_BS.roll(-1, 1)
OWN = {
    "llama": {},
    "tied": {"tied_embeddings": True},
    "gpt2": {"tied_embeddings": True, "position": "learned", "norm": "layernorm", "activation": "gelu", "kv_heads": 4},
}
SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1, "vocab_size": 31, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
MORE: dict[str, dict[str, Any]] = {
    "minicpm3": LATENT,
    "gemma3n_text": {"hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0, "laurel_rank": 4},
}
"""Additional settings that make models of some families small."""


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill all memory that torch returns uninitialised with NaN, or with the largest integer."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def ready(model: AnyDecoder) -> AnyDecoder:
    """Return a model with allocated and initialised weights."""
    materialise(model, "cpu", torch.float32)
    fill(model, Weights(source="dummy"), seed=0)
    post_load(model)
    return model


def through(stages: dict[int, nn.Module]) -> float:
    """Run all stages one after the other and return the loss; checks that every gradient is finite."""
    x = TOKENS_BS
    for number in range(len(SPANS) - 1):
        x = stages[number](x)
    return backward(stages[len(SPANS) - 1](x, LABELS_BS), stages.values())


def backward(loss: torch.Tensor, modules: Any) -> float:
    loss.backward()
    for module in modules:
        for name, parameter in module.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name
    return float(loss.detach())


def whole(model: AnyDecoder) -> float:
    return backward(ready(model)(TOKENS_BS, LABELS_BS), [model])


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.usefixtures("poisoned")
def test_partools_own_decoder(kind: str) -> None:
    sizes = {"layers": 4, "hidden": 16, "ffn_hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab": 31}
    config = ModelConfig.model_validate(sizes | {"max_position": 16} | OWN[kind])
    expected = whole(build(config))
    assert expected == expected
    for ranks in (FOLDED, ((0, 2), (1, 3)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))):
        parts = [ready(build_parts(config, SPANS, mine)) for mine in ranks]
        assert all(isinstance(part, DecoderParts) for part in parts)
        assert through({n: s for part in parts for n, s in part.stages.items()}) == pytest.approx(expected, rel=1e-5)
    with torch.device("meta"):
        ring = RingDecoder(config, SPANS, range(4))
    ready(ring)
    x = ring.first(TOKENS_BS)
    for stage in ring.stages:
        x = stage(x)
    assert backward(ring.last(x, LABELS_BS), [ring]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_deep", "gpt_neox_deep", "gemma_deep", "gemma3_text_deep"])
@pytest.mark.usefixtures("poisoned")
def test_models_of_transformers(kind: str, tmp_path: Path) -> None:
    check_hf(write_model(kind, tmp_path))
    assert MODELS[kind]["num_hidden_layers"] == len(SPANS)


def check_hf(path: Path) -> None:
    """Check that the whole model, two ranks' stages, and one stage per rank give the same loss."""
    described = describe(path)
    config = ModelConfig.model_validate(described["fields"], strict=False)
    hf = HfModel(path=str(path), model_type=described["structure"]["model_type"], architecture="X")
    expected = whole(HfDecoder(hf, config))
    assert expected == expected
    for ranks in (FOLDED, ((0,), (1,), (2,), (3,))):
        parts = [ready(HfParts(hf, config, SPANS, mine, wide=False)) for mine in ranks]
        assert through({n: s for part in parts for n, s in part.stages.items()}) == pytest.approx(expected, rel=1e-5)


def families() -> list[str]:
    """Return the model types of language models whose embedding has a buffer."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    found = set()
    for file in sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        for body in re.findall(r"^class \w+\(nn\.Embedding\):\n((?:[ \t].*\n|\n)*)", text, re.MULTILINE):
            if "Buffer(" in body or "register_buffer(" in body:
                found |= {name for name in (f"{file.parent.name}_text", file.parent.name) if name in causal}
    return sorted(found)


@pytest.mark.long
@pytest.mark.usefixtures("poisoned")
def test_every_family_with_a_buffer_in_its_embedding_trains_or_is_refused(tmp_path: Path) -> None:
    import transformers

    trained = []
    for name in families():
        if f"{name}_text" in families():
            continue  # the same language model behind encoders of images
        transformers.CONFIG_MAPPING[name](**SMALL | MORE.get(name, {})).save_pretrained(tmp_path / name)
        try:
            refused = describe(tmp_path / name)["head_problem"]
        except ConfigurationError as error:
            refused = error.code
        if not refused:
            check_hf(tmp_path / name)
            trained.append(name)
    assert {"gemma", "gemma3_text"} <= set(trained)


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.usefixtures("poisoned")
def test_sharded_models_with_shards_anywhere(offload: str, tmp_path: Path) -> None:
    path = write_model("gemma_deep", tmp_path)
    (tmp_path / "disk").mkdir()
    base = small_plan(tmp_path, ranks=1, model={"vocab": 31})
    plan = plan_of(base, path, Mesh(dp_shard=1), zero=3, offload_parameters=offload, dir=str(tmp_path / "disk"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        prepared = prepare(plan, build_ranks(plan, torch.device("cpu")), lambda done, sent: None)
        fill(prepared.model, Weights(source="hf", path=str(path)), seed=0)
        if prepared.shards is not None:
            prepared.shards.written()
        post_load(prepared.model)
        batch = [MicroBatch(TOKENS_BS, LABELS_BS)]
        loss = prepared.passes.step(batch, torch.tensor(1.0), lambda term: nullcontext())
        assert loss.isfinite()
        if prepared.shards is not None:
            prepared.shards.close()
        prepared.memory.close()
    finally:
        dist.destroy_process_group()


def test_what_nothing_fills_is_found() -> None:
    """Found: a parameter that no name refers to, and one that a source of weights skips."""
    model = build(ModelConfig(layers=1, hidden=8, ffn_hidden=8, heads=1, kv_heads=1, head_dim=8, vocab=5))
    materialise(model, "cpu")
    with pytest.raises(ConfigurationError, match=r"PT622.*embed\.weight.* and "):
        post_load(model)
    ready(model)
    more = nn.Linear(2, 2)
    model.roots = lambda: (model, more)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="weight of Linear has no name in the model: nothing fills it"):
        post_load(model)
