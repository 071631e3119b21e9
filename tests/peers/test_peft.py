"""PEFT loads what partool exports of an adapter, and computes the same; partool reads what PEFT saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _peers import environment, needed

from partool.layout.adapters import is_adapter
from partool.layout.parameters import parameters
from partool.spec.adapter import LowRank
from partool.spec.model import ModelConfig, Weights
from partool_runtime.hf import write_folder
from partool_runtime.hf.peft import open_adapter, write_adapter
from partool_runtime.model import Decoder
from partool_runtime.weights import fill, fill_from
from partool_runtime.weights.draw import init_source

pytestmark = pytest.mark.long
_JUDGE = Path(__file__).with_name("_judge_peft.py")
_TRAINING = Path(__file__).with_name("_judge_peft_training.py")
_SIZES: dict[str, Any] = {"layers": 2, "hidden": 20, "ffn_hidden": 27, "vocab": 31, "head_dim": 4, "init_std": 0.2}
MODELS = {
    "llama": _SIZES | {"heads": 4, "kv_heads": 2},
    "gpt2": _SIZES | {
        "heads": 5, "kv_heads": 5, "norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
        "qkv_bias": True, "out_bias": True, "ffn_bias": True, "tied_embeddings": True,
    },
    "experts": _SIZES | {
        "heads": 4, "kv_heads": 2, "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 9}, "qk_norm": True,
    },
}  # fmt: skip
TARGETS = {
    "llama": ("q_proj", "down_proj"), "gpt2": ("q", "k", "v", "up"), "experts": ("q", "gate", "up", "down")
}  # fmt: skip


def decoder(model: ModelConfig, values: dict[str, torch.Tensor]) -> Decoder:
    """Return a decoder with drawn weights and the values of an adapter."""
    made = Decoder(model).double()
    fill_from(made, init_source(model, 3))
    made.load_state_dict({n: p.detach() for n, p in made.named_parameters()} | values)
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "kind", "tolerance"),
    [
        ("llama", "lora", 1e-5), ("llama", "dora", 1e-5), ("gpt2", "lora", 1e-10), ("gpt2", "dora", 1e-10),
        ("experts", "lora", 1e-5),
    ],
)  # fmt: skip
def test_peft_computes_the_same(tmp_path: Path, name: str, kind: Any, tolerance: float) -> None:
    """transformers turns queries and keys in float32 wherever there is RoPE."""
    needed("peft")
    adapter = LowRank(kind=kind, rank=3, alpha=5.0)
    model = ModelConfig.model_validate(MODELS[name] | {"adapter": adapter})
    shapes = {info.name: info.shape for info in parameters(model)}
    generator = torch.Generator().manual_seed(4)
    values = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items() if is_adapter(n)}
    ours = decoder(model, values)
    base, exported, saved = (tmp_path / each for each in (name, "exported", "saved"))
    state = {n: p.detach() for n, p in ours.named_parameters()}
    plain = model.model_copy(update={"adapter": None})
    write_folder({n: t for n, t in state.items() if not is_adapter(n)}, plain, base)
    write_adapter(values, model, exported, base=str(base))
    line = [sys.executable, str(_JUDGE), str(base), str(exported), str(saved)]
    ended = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    logits = {key: torch.tensor(each, dtype=torch.float64) for key, each in answer.items()}
    tokens = torch.arange(14).view(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens), logits["exported"], rtol=tolerance, atol=tolerance)
        other = LowRank(rank=3, alpha=5.0, rslora=True, targets=TARGETS[name])
        read_model = model.model_copy(update={"adapter": other})
        shapes = {info.name: info.shape for info in parameters(read_model)}
        with open_adapter(saved, read_model) as folder:
            folder.check(shapes)
            read = {n: folder.block(n, s, (0,) * len(s), s).double() for n, s in shapes.items() if is_adapter(n)}
        got = decoder(read_model, read).logits(tokens)
    torch.testing.assert_close(got, logits["saved"], rtol=tolerance, atol=tolerance)
    assert float((logits["saved"] - logits["exported"]).abs().max()) > 1e-2


STEPS = 10
TRAINED: dict[str, tuple[dict[str, Any], LowRank]] = {
    "lora": (MODELS["llama"], LowRank(rank=3, alpha=5.0)),
    "dora": (MODELS["llama"], LowRank(kind="dora", rank=3, alpha=5.0)),
    "experts": (MODELS["experts"], LowRank(rank=3, alpha=5.0, targets=("q", "o", "down"))),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TRAINED)
def test_peft_trains_the_same(tmp_path: Path, name: str) -> None:
    """Ten steps of fine-tuning on answers, from B ≠ 0: losses, and the adapter that PEFT saves."""
    needed("peft")
    fields, adapter = TRAINED[name]
    model = ModelConfig.model_validate(fields | {"adapter": adapter})
    ours = Decoder(model).double()
    fill(ours, Weights(), seed=3)
    generator = torch.Generator().manual_seed(4)
    parameters_by_name = dict(ours.named_parameters())
    trained = {n: p for n, p in parameters_by_name.items() if is_adapter(n)}
    for each, parameter in parameters_by_name.items():
        parameter.requires_grad_(each in trained)
        if each.endswith("lora_b"):
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    base, first, last = (tmp_path / each for each in (name, "first", "last"))
    plain = model.model_copy(update={"adapter": None})
    write_folder({n: p.detach() for n, p in parameters_by_name.items() if n not in trained}, plain, base)
    write_adapter({n: p.detach() for n, p in trained.items()}, model, first, base=str(base))
    batches = [torch.randint(31, (2, 9), generator=generator) for _ in range(STEPS)]
    labels = [torch.where(torch.arange(9) < 4, -100, batch.roll(-1, 1)) for batch in batches]
    pairs = [(b.tolist(), wanted.tolist()) for b, wanted in zip(batches, labels, strict=True)]
    (tmp_path / "batches.json").write_text(json.dumps(pairs))
    line = [sys.executable, str(_TRAINING), str(base), str(first), str(tmp_path / "batches.json"), str(last)]
    ended = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    optimizer, losses = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.0), []
    for batch, wanted in zip(batches, labels, strict=True):
        optimizer.zero_grad()
        loss = ours(batch, wanted) / int((wanted != -100).sum())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(json.loads(ended.stdout.splitlines()[-1]), rel=1e-8)
    with open_adapter(last, model) as folder:
        folder.check({n: tuple(p.shape) for n, p in parameters_by_name.items()})
        for each, parameter in trained.items():
            shape = tuple(parameter.shape)
            saved = folder.block(each, shape, (0,) * len(shape), shape)
            torch.testing.assert_close(parameter.detach(), saved, rtol=1e-7, atol=1e-7, msg=each)
