"""Reads a Hugging Face ``config.json`` into fields of :class:`ModelConfig`; reports unsupported features as findings.

Keys have the meaning that they have in the configuration classes of transformers 4.50 to 5.x (``rope_scaling`` with
``rope_theta``, later ``rope_parameters``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from partool.catalog.huggingface_attention import CONFIG_PATH, LATENT, rope, windows
from partool.catalog.huggingface_attention import config_error as _error
from partool.catalog.huggingface_experts import DEFAULTS, KEYS, experts
from partool.diagnostics.record import Diagnostic
from partool.spec.model_code import DEQUANTIZE

_LLAMA_LIKE = {
    "num_hidden_layers": "layers", "hidden_size": "hidden", "intermediate_size": "ffn_hidden",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "vocab_size": "vocab",
    "max_position_embeddings": "max_position", "rms_norm_eps": "norm_eps", "initializer_range": "init_std",
    "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip
_GPT2 = {
    "n_layer": "layers", "n_embd": "hidden", "n_inner": "ffn_hidden", "n_head": "heads", "vocab_size": "vocab",
    "n_positions": "max_position", "layer_norm_epsilon": "norm_eps", "initializer_range": "init_std",
    "tie_word_embeddings": "tied_embeddings",
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8, "rms_norm_eps": 1e-6},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "gpt2": {"tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3_moe": {"sliding_window": 4096, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
    "deepseek_v2": {"rms_norm_eps": 1e-6},
    "deepseek_v3": {"rms_norm_eps": 1e-6},
    "gpt_oss": {
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150000.0,
        "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}  # fmt: skip
_NO_EFFECT = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "ep_size", "experts_per_token", "id2label", "initial_context_length", "is_encoder_decoder", "label2id", "n_ctx",
    "output_attentions", "output_hidden_states",
    "pad_token_id", "pretraining_tp", "problem_type", "qk_head_dim", "return_dict", "rope_interleave",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
"""Keys that do not change the decoder; those of tokens, types and the order of rotated rows are read elsewhere."""
_READ = {
    "model_type", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "activation_function",
    "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "swiglu_alpha",
    "swiglu_limit",
}  # fmt: skip
"""Further keys that functions of this module read."""
_NOISE = (
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "router_jitter_noise",
)  # fmt: skip
"""Keys of random changes in training: of dropout, and of factors of routers' inputs."""
_MUST_BE: dict[str, Any] = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "add_cross_attention": False, "quantization_config": None,
}  # fmt: skip

_NO_FILE = "give the path of a config.json; that of a model on a hub: hf download NAME config.json --local-dir DIR"
_UNQUANTIZED = "take the folder of the model before it was quantized"


def read_config(path: Path, *, predictions: int = 0) -> tuple[dict[str, Any] | None, bytes, list[Diagnostic]]:
    """Read the config.json at ``path`` or in folder ``path``; return ModelConfig fields, file bytes and findings.

    ``predictions`` is the number of modules for multi-token prediction that the spec trains.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = file.read_bytes()
        config = json.loads(content)
    except OSError as error:
        return (
            None,
            b"",
            [_error("PT251", f"{file} cannot be read: {error.strerror}", _NO_FILE)],
        )
    except ValueError as error:
        return None, b"", [_error("PT251", f"{file} is not JSON: {error}", "give the path of a config.json")]
    if not isinstance(config, dict):
        return None, content, [_error("PT251", f"{file} does not hold a JSON object", "give the path of a config.json")]
    try:
        fields, findings = convert(config, predictions=predictions)
    except KeyError as error:
        message = f"{file} lacks the key {error}"
        return None, content, [_error("PT251", message, "compare it with the model's original config.json")]
    except (AttributeError, TypeError, ValueError) as error:
        message = f"{file} has a value of the wrong kind: {error}"
        return None, content, [_error("PT251", message, "compare it with the model's original config.json")]
    return fields, content, findings


def convert(config: dict[str, Any], *, predictions: int = 0) -> tuple[dict[str, Any] | None, list[Diagnostic]]:
    """Return a configuration's ModelConfig fields, and findings; an error among them means that it is not supported.

    ``predictions`` is the number of modules for multi-token prediction that the spec trains.
    """
    kind = config.get("model_type")
    if kind not in _DEFAULTS:
        supported_types = (
            f"known types: {', '.join(sorted(_DEFAULTS))}; for others, write model: {{hf: FOLDER OF THIS FILE}}"
        )
        return None, [_error("PT252", f"model_type {kind!r} is not known", supported_types)]
    config = {
        **_DEFAULTS[kind],
        **DEFAULTS.get(kind, {}),
        **{key: value for key, value in config.items() if value is not None or key in _NULLABLE},
    }
    names = _GPT2 if kind == "gpt2" else _LLAMA_LIKE
    fields = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
    findings = _sizes(config, names)
    if findings:
        return None, findings
    findings = _unsupported(config, kind, names)
    fields.update(_gpt2_fields(fields) if kind == "gpt2" else _family_fields(config, kind, findings))
    moe, lacking = experts(config, kind)
    findings += [_error("PT253", f"{text} is not supported") for text in lacking]
    if moe is not None:
        fields["moe"] = moe
    if kind in LATENT:
        fields["mla"] = _mla(config)
        fields["head_dim"] = fields["mla"]["nope_head_dim"] + fields["mla"]["rope_head_dim"]
        findings += _not_trained(config, predictions)
    return fields, findings


def read_generation(path: Path, vocab: int) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Return the fields of a plan's ``Generation`` from the folder of a config.json that :func:`read_config` accepted.

    Token ids that a vocabulary of ``vocab`` does not have are left out, with a finding.
    """
    file = path / "config.json" if path.is_dir() else path
    config, beyond = json.loads(file.read_bytes()), []
    defaults = _SPECIAL_TOKENS.get(config.get("model_type"), {})
    given = {key: config[key] for key in _TOKEN_IDS if key in config}
    ids = {key: value for key, value in defaults.items() if key not in config and value < vocab}
    beside = file.with_name("generation_config.json")
    try:
        settings = json.loads(beside.read_bytes()) if beside.is_file() else {}
        if not isinstance(settings, dict):
            raise ValueError("it does not hold an object")
    except (OSError, ValueError) as error:
        message = f"{beside} cannot be read, and exports will lack it: {error}"
        return {"token_ids": ids | given}, [
            Diagnostic("PT692", message, "warning", CONFIG_PATH, help="mend it or remove it")
        ]
    for where, token_ids in (("config.json", given), (beside.name, settings)):
        for key in [key for key in _TOKEN_IDS if not _in_vocabulary(token_ids.get(key), vocab)]:
            beyond.append(f"{key}: {token_ids.pop(key)!r} ({where})")
    findings = []
    if beyond:
        message = f"not in the vocabulary of {vocab}, and left out of exports: {', '.join(beyond)}"
        help = "text that the exported model generates may not end; set the ids in the export's config.json"
        findings.append(Diagnostic("PT692", message, "warning", CONFIG_PATH, help=help))
    return {"token_ids": ids | given, "settings": settings}, findings


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SPECIAL_TOKENS: dict[str, dict[str, int]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"bos_token_id": 1, "eos_token_id": 2},
    "mixtral": {"bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v2": {"bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v3": {"bos_token_id": 0, "eos_token_id": 1},
    "gpt2": {"bos_token_id": 50256, "eos_token_id": 50256},
}
"""Model type → default ids of special tokens in transformers' configuration class, by key of config.json."""


def _in_vocabulary(value: Any, vocab: int) -> bool:
    """Return True if a token id, or every id of a list, is in the vocabulary; None counts as an empty list."""
    many = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(number) is int and 0 <= number < vocab for number in many)


_NULLABLE = {"sliding_window", "q_lora_rank"}


def _sizes(config: dict[str, Any], names: dict[str, str]) -> list[Diagnostic]:
    """Return a finding for each size in the configuration that is not a whole number above zero."""
    not_sizes = ("norm_eps", "init_std", "tied_embeddings")
    sizes = {key: config.get(key) for key, ours in names.items() if ours not in not_sizes}
    wrong = {key: value for key, value in sizes.items() if value is not None and (type(value) is not int or value < 1)}
    return [_error("PT253", f"{key}: {value!r} is not a size", "whole numbers from 1") for key, value in wrong.items()]


def _unsupported(config: dict[str, Any], kind: str, names: dict[str, str]) -> list[Diagnostic]:
    findings = []
    activation = config.get("activation_function", "gelu_new") if kind == "gpt2" else config.get("hidden_act", "silu")
    allowed = ("gelu_new", "gelu_pytorch_tanh") if kind == "gpt2" else ("silu", "swish")
    if activation not in allowed:
        findings.append(
            _error("PT253", f"activation {activation!r} of a {kind} model is not supported", f"supported: {allowed[0]}")
        )
    for key, value in _MUST_BE.items():
        if key == "quantization_config" and _in_blocks(config.get(key)):
            continue
        if key in config and config[key] != value:
            help = _unquantized(config[key]) if key == "quantization_config" else f"only {value!r} is"
            findings.append(_error("PT253", f"{key}: {config[key]!r} is not supported", help))
    dropped = [key for key in _NOISE if config.get(key)]
    supported_keys = _NO_EFFECT | _READ | KEYS | set(_MUST_BE) | set(_NOISE) | set(names)
    unknown = sorted(set(config) - supported_keys - ({"num_nextn_predict_layers"} if kind in LATENT else set()))
    if kind not in LATENT and "num_nextn_predict_layers" in unknown:
        findings.append(_error("PT253", "num_nextn_predict_layers (multi-token prediction) is not supported"))
    if dropped or unknown:
        text = ", ".join([*dropped, *unknown])
        findings.append(
            Diagnostic(
                "PT254",
                f"ignored keys of the config: {text}",
                "warning",
                CONFIG_PATH,
                help="training here has neither dropout nor noise in routers; check that other keys change nothing",
            )
        )
    return findings


def _unquantized(how: Any) -> str:
    """Return where to get weights that are not quantized."""
    return DEQUANTIZE if isinstance(how, dict) and how.get("quant_method") == "mxfp4" else _UNQUANTIZED


def _in_blocks(how: Any) -> bool:
    """Return True for weights in 8 bits with a scale per block, which are read as 16 bits (arXiv 2412.19437)."""
    block = how.get("weight_block_size") if isinstance(how, dict) else None
    return isinstance(block, list) and len(block) == 2 and how.get("quant_method") == "fp8"


def _gpt2_fields(fields: dict[str, Any]) -> dict[str, Any]:
    hidden = fields.get("hidden", 768)
    return {
        "ffn_hidden": fields.get("ffn_hidden") or 4 * hidden, "norm": "layernorm", "activation": "gelu_tanh",
        "position": "learned", "qkv_bias": True, "out_bias": True, "ffn_bias": True,
    }  # fmt: skip


def _family_fields(config: dict[str, Any], kind: str, findings: list[Diagnostic]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    fields: dict[str, Any] = {
        "qkv_bias": kind == "qwen2" or bias,
        "out_bias": bias and kind != "qwen2",
        "ffn_bias": bool(config.get("mlp_bias", False)),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
    }
    if kind == "gpt_oss":
        fields |= {"activation": "swiglu_clamped", "sinks": True}
        fields |= {name: float(config[name]) for name in ("swiglu_alpha", "swiglu_limit")}
    fields.update(rope(config, findings))
    fields.update(windows(config, kind, findings))
    return fields


def _not_trained(config: dict[str, Any], predictions: int) -> list[Diagnostic]:
    """Return a finding about layers for multi-token prediction (arXiv 2412.19437, section 2.2) that stay unused."""
    layers, count = config.get("num_hidden_layers", 0), config.get("num_nextn_predict_layers", 0)
    if not count or predictions >= count:
        return []
    numbers = ", ".join(str(layers + index) for index in range(predictions, count))
    text = f"layers for multi-token prediction are neither trained nor exported: model.layers {numbers}"
    help = f"write model.multi_token: {{depth: {count}}} to train them; else a run's log names their tensors as unused"
    return [Diagnostic("PT255", text, "warning", CONFIG_PATH, help=help)]


def _mla(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "q_rank": config.get("q_lora_rank", 1536),
        "kv_rank": config.get("kv_lora_rank", 512),
        "nope_head_dim": config.get("qk_nope_head_dim", 128),
        "rope_head_dim": config.get("qk_rope_head_dim", 64),
        "v_head_dim": config.get("v_head_dim", 128),
    }
