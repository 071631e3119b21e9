"""Models, weights and data that are not there, not of this shape, or of a kind that cannot be trained."""

from __future__ import annotations

import json
from typing import Any

from broken.case import Broken, broken, broken_here

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
_FROZEN = "{{layers: 8, hidden: 512, heads: 8, vocab: 32000, frozen: {}}}"
_WEIGHTS = "{{layers: 2, hidden: 64, heads: 4, vocab: 256, weights: {}}}"


def _config(**changes: Any) -> dict[str, str]:
    """Return the file ``config.json`` of a small Llama, with changes."""
    return {"config.json": json.dumps(LLAMA | changes)}


def _tokenizer(size: int) -> dict[str, str]:
    words = {f"word{number}": number for number in range(size)}
    return {"tok/tokenizer.json": json.dumps({"model": {"vocab": words}}), "a.txt": "some text\n"}


CASES: list[Broken] = [
    # Sizes of the model.
    broken(
        "LLMs-from-scratch #444: 48 heads, the number of layers, for a width of 1600",
        "PT205", "model.hidden", "use hidden: 1584 or 1632",
        model="{layers: 25, hidden: 1600, heads: 48, vocab: 50257}",
    ),
    broken(
        "gpt-neox #1314: numbers of heads that end in an error of a reshape",
        "PT204", "model.kv_heads", "kv_heads can be 1, 2, 4 or 8",
        model="{layers: 2, hidden: 512, heads: 8, kv_heads: 3, vocab: 32000}",
    ),
    broken(
        "LLaMA-Factory #9178: KeyError for a model type that is not known",
        "PT252", "model.config", "known types: deepseek_v2, deepseek_v3, gpt2, llama",
        model="{config: config.json}", files=_config(model_type="qwen3_next"),
    ),
    broken(
        "Ling #11: unknown RoPE scaling",
        "PT253", "model.config", "supported: none, llama3",
        model="{config: config.json}", files=_config(rope_scaling={"type": "dynamic", "factor": 4.0}),
    ),
    broken(
        "ComfyUI_ChatterBox_Voice #1: rope_scaling with other keys than expected",
        "PT251", "model.config", "lacks the key 'factor'",
        model="{config: config.json}", files=_config(rope_scaling={"rope_type": "llama3"}),
    ),
    broken(
        "axolotl #913: somebody trained an AWQ model in full",
        "PT253", "model.config", "before it was quantized",
        model="{config: config.json}", files=_config(quantization_config={"quant_method": "awq"}),
    ),
    # Weights.
    broken_here(
        "torchtitan #1311: a checkpoint that is not found, and training silently starts from random weights",
        "PT620", "model.weights.path", "a run's folder",
        model=_WEIGHTS.format("{source: checkpoint, path: runs/step-500}"),
    ),
    broken_here(
        "OmTrackVLA #35: a path of another machine, and random weights were measured",
        "PT620", "model.weights.path", "a folder on disk",
        model=_WEIGHTS.format("{source: hf, path: /data23/Qwen3-0.6B}"),
    ),
    broken(
        "torchtitan #3578: weights of Hugging Face without their path",
        "PT211", "model.weights", "add path: FOLDER", model=_WEIGHTS.format("{source: hf}"),
    ),
    broken(
        "torchtitan #1900: a setting of initial weights that was ignored",
        "PT212", "model.weights.path", "set source: hf or checkpoint",
        model=_WEIGHTS.format("{path: /models/qwen3-1.7b}"),
    ),
    broken_here(
        "llama3-from-scratch #16: weights of a model of another size",
        "PT621", "model.weights.path", "hidden is 64 in the model and 128 in the folder",
        model=_WEIGHTS.format("{source: hf, path: 8b}"),
        files={"8b/config.json": json.dumps(LLAMA | {"hidden_size": 128, "num_hidden_layers": 4})},
    ),
    # Frozen parts.
    broken(
        "ms-swift #7226: modle.layers.2 froze nothing, and nobody said so",
        "PT623", "model.frozen[1]", "nearest: layers.*.*", model=_FROZEN.format("['layers.1.*', 'leyers.2.*']"),
    ),
    broken(
        "lerobot #4018: names that no parameter has, since the first version",
        "PT623", "model.frozen[0]", "nearest: embed.weight", model=_FROZEN.format("[text_model.model.norm.weight]"),
    ),
    broken(
        "LLaMA-Factory #723: freezing, and no inf checks were recorded for this optimizer",
        "PT623", "model.frozen", "nothing would be trained", model=_FROZEN.format("['*']"),
    ),
    # Data.
    broken_here(
        "axolotl #618: KeyError: 'text', the field is TEXT",
        "PT602", "data.source", "its keys: TEXT", data="{source: a.jsonl}", files={"a.jsonl": '{"TEXT": "hello"}\n'},
    ),
    broken_here(
        "gpt-neox #626: a JSON document in place of one record per line",
        "PT602", "data.source", "one JSON object per line",
        data="{source: a.json}", files={"a.json": '[\n{"text": "hello"}\n]\n'},
    ),
    broken_here(
        "ChatGLM-6B #1196: a line that is not JSON",
        "PT602", "data.source", "a.jsonl:2 is not valid JSON",
        data="{source: a.jsonl}", files={"a.jsonl": '{"text": "hello"}\n{"text": \n'},
    ),
    broken_here(
        "pythia #180: .bin without its .idx",
        "PT602", "data.source", "a.bin has no a.idx beside it",
        data="{source: a.bin, format: megatron}", files={"a.bin": "0000"},
    ),
    broken_here(
        "Megatron-LM #119: dataset does not exist, and a NoneType has no attribute 'sizes'",
        "PT601", "data.source", "there are no files at", data="{source: openwebtext/subset-01}",
    ),
    broken_here(
        "lit-llama #306: a tokenizer of 64 K words for a model of 32 K ends in a device-side assert",
        "PT258", "model.vocab", "set model.vocab to 300 or more",
        data="{source: a.txt, tokenizer: tok}", files=_tokenizer(300),
    ),
]  # fmt: skip
