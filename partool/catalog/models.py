"""Turns the ``model`` section (preset, Hugging Face config, fields that override them) into a :class:`ModelConfig`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from partool.catalog.following import following
from partool.catalog.huggingface import read_config, read_generation
from partool.catalog.lookup import did_you_mean, table, table_hash
from partool.catalog.transformers_process import DescriptionError, describe, describe_module
from partool.diagnostics.record import Diagnostic
from partool.spec.model import GATED, LayerPattern, Mla, ModelConfig, ModelSpec
from partool.spec.model_code import files_hash, module_file
from partool.spec.training import TrainingSpec

_SEQUENCE_LENGTH: int = TrainingSpec.model_fields["sequence_length"].default
_REQUIRED = ("layers", "hidden", "heads", "vocab")
_NOT_FIELDS = {"preset", "config", "hf", "module", "weights", "frozen", "attention"}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A resolved ``model`` section. ``config`` is None exactly if there is an error among the diagnostics."""

    config: ModelConfig | None
    source: str
    diagnostics: tuple[Diagnostic, ...]
    inputs: dict[str, str] = field(default_factory=dict)
    """Name of a file or table that was read → its SHA-256, for ``Plan.inputs``."""
    described: dict[str, Any] | None = None
    """Description by the runtime of a model that transformers builds; None for partool's own decoders."""
    generation: dict[str, Any] | None = None
    """Settings for generating text, as fields of the plan's ``Generation``; None without ``model.config``."""


def resolve_model(
    spec: ModelSpec, base_dir: Path, vocab: int | None = None, *, sequence_length: int = _SEQUENCE_LENGTH
) -> ResolvedModel:
    """Return the model with every field decided, and findings.

    ``vocab`` is the tokenizer's number of tokens, used if neither spec, preset nor file gives ``vocab``. A module of
    the user's own is described for sequences of ``sequence_length`` tokens.
    """
    if spec.hf is not None:
        return _of_transformers(spec, base_dir / spec.hf)
    if spec.module is not None:
        return _of_module(spec, spec.module, base_dir, sequence_length)
    base, source, findings, inputs = _base(spec, base_dir)
    if base is None:
        return ResolvedModel(None, source, tuple(findings), inputs)
    given = {name: getattr(spec, name) for name in type(spec).model_fields if name not in _NOT_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    origin = f"preset {spec.preset}" if spec.preset is not None else source
    followed = following(base, given)
    if source and (changed := sorted(given)):
        source = f"{source}, with {', '.join(changed)} from the spec{_followed_text(followed)}"
    fields = {**base, **followed, **given}
    fields.setdefault("vocab", vocab)
    if fields.get("mla") is not None and "head_dim" not in given:
        fields["head_dim"] = None  # it follows from the parts of a head, which the spec may change
    fields = {name: value for name, value in fields.items() if value is not None}
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        text = f"the model is not complete: {', '.join(missing)} missing"
        findings.append(Diagnostic("PT202", text, path=("model",), help="write a preset, a config or these fields"))
        return ResolvedModel(None, source, tuple(findings), inputs)
    _derive(fields)
    findings.extend(_attention(spec, fields))
    kept = {name: origin for name in base if name not in given and name not in followed}
    config = _validated(fields, findings, kept)
    if config is not None:
        findings.extend(_inconsistent(config, kept))
    failed = any(finding.severity == "error" for finding in findings)
    generation = None
    if isinstance(spec.config, str) and config is not None and not failed:
        generation, more = read_generation(base_dir / spec.config, config.vocab)
        findings.extend([*more, *_padding(config, generation["token_ids"].get("pad_token_id"))])
    config = None if failed else config
    return ResolvedModel(config, source or "the spec's fields", tuple(findings), inputs, generation=generation)


def _of_transformers(spec: ModelSpec, folder: Path) -> ResolvedModel:
    """Return the model that transformers builds from ``folder``, with the fields that the cost model needs.

    The spec cannot override these fields.
    """
    given = [n for n in type(spec).model_fields if n not in _NOT_FIELDS and getattr(spec, n) is not None]
    if given or spec.attention is not None:
        what = ", ".join([*given, *(["attention"] if spec.attention is not None else [])])
        help = "change the folder's config.json, or write model.config in place of model.hf"
        finding = Diagnostic(
            "PT454", f"{what} cannot be changed in a model that transformers builds", path=("model", "hf"), help=help
        )
        return ResolvedModel(None, "", (finding,))
    try:
        described, digest = describe(folder)
    except DescriptionError as error:
        return ResolvedModel(None, "", (Diagnostic(error.code, str(error), path=("model", "hf"), help=error.help),))
    findings: list[Diagnostic] = []
    fields = dict(described["fields"])
    config = _validated({**fields, "layer_types": tuple(fields.get("layer_types", ()))}, findings)
    return ResolvedModel(config, f"{spec.hf} (transformers)", tuple(findings), {"model.hf": digest}, described)


def module_model(spec: ModelSpec, base_dir: Path) -> dict[str, Any]:
    """Return what the plan's ``ModuleModel`` says of a module besides its files."""
    config = spec.config if isinstance(spec.config, dict) else {}
    return {"module": spec.module or "", "config": config, "folder": str(base_dir.absolute())}


def _of_module(spec: ModelSpec, name: str, base_dir: Path, sequence_length: int) -> ResolvedModel:
    """Return the user's own module, with the fields that the cost model needs, which its graph shows."""
    path = ("model", "module")
    given = [n for n in type(spec).model_fields if n not in _NOT_FIELDS and getattr(spec, n) is not None]
    if given or spec.attention is not None or isinstance(spec.config, str):
        what = ", ".join(given or ["a path as config" if isinstance(spec.config, str) else "attention"])
        message, help = f"{what} cannot be given for a module of yours", "write keywords of its constructor in config"
        return ResolvedModel(None, "", (Diagnostic("PT454", message, path=path, help=help),))
    try:
        model = module_model(spec, base_dir)
        module_file(name.partition(":")[0], model["folder"])  # says which part of the name is not found
        described = describe_module(model, sequence_length)
    except OSError as error:
        help = "install the package, or put the file beside the spec"
        return ResolvedModel(None, "", (Diagnostic("PT655", str(error), path=path, help=help),))
    except DescriptionError as error:
        return ResolvedModel(None, "", (Diagnostic(error.code, str(error), path=path, help=error.help),))
    findings: list[Diagnostic] = []
    config = _validated(dict(described["fields"]), findings)
    return ResolvedModel(
        config, name, tuple(findings), {"model.module": files_hash(described["code_files"])}, described
    )


def _other_model(name: str, presets: Mapping[str, Any], base_dir: Path) -> str:
    """Return help for a name that is no preset: the path of a model, or a name on a hub, stands at another key."""
    if name.endswith(".json"):
        return f"for the configuration in a file, write model: {{config: {name}}}"
    if name.startswith((".", "/", "~")) or (base_dir / name).is_dir():
        return f"for the model in a folder, write model: {{hf: {name}}}"
    help = did_you_mean(name.rpartition("/")[2], presets)
    return f"{help} Or download it, and write model: {{hf: FOLDER}}" if "/" in name else help


def _base(spec: ModelSpec, base_dir: Path) -> tuple[dict[str, Any] | None, str, list[Diagnostic], dict[str, str]]:
    if spec.preset is not None:
        presets = table("models")
        if spec.preset not in presets:
            text = f"there is no model preset {spec.preset!r}"
            help = _other_model(spec.preset, presets, base_dir)
            finding = Diagnostic("PT250", text, path=("model", "preset"), help=help)
            return None, "", [finding], {}
        entry = presets[spec.preset]
        fields = dict(entry["fields"])
        attention = fields.pop("attention", None)
        if attention:
            kinds = attention.get("pattern", ("sliding",))
            fields |= {"window": attention["window"], "sinks": attention.get("sinks", False)}
            fields["layer_types"] = tuple(kinds[layer % len(kinds)] for layer in range(fields["layers"]))
        source = f"preset {spec.preset}" + (f" ({entry['differs']})" if "differs" in entry else "")
        return fields, source, [], {"catalog/models": table_hash("models")}
    if isinstance(spec.config, str):
        predictions = 0 if spec.multi_token is None else spec.multi_token.depth
        fields_or_none, content, findings = read_config(base_dir / spec.config, predictions=predictions)
        return fields_or_none, spec.config, findings, {"model.config": hashlib.sha256(content).hexdigest()}
    return {}, "", [], {}


def _derive(fields: dict[str, Any]) -> None:
    """Fill in missing ``fields`` of a model in place, from its other fields and common conventions."""
    fields.setdefault("kv_heads", fields["heads"])
    if "head_dim" not in fields and "mla" in fields:
        fields["head_dim"] = Mla.model_validate(fields["mla"]).qk_head_dim
    if "head_dim" not in fields and fields["hidden"] % fields["heads"] == 0:
        fields["head_dim"] = fields["hidden"] // fields["heads"]
    if "ffn_hidden" not in fields:
        gated = fields.get("activation", "swiglu") in GATED
        # Shazeer, arXiv 2002.05202: two thirds of 4h keeps a gated network's size; rounded up to a multiple of 64.
        fields["ffn_hidden"] = -(-8 * fields["hidden"] // (3 * 64)) * 64 if gated else 4 * fields["hidden"]


def _attention(spec: ModelSpec, fields: dict[str, Any]) -> list[Diagnostic]:
    """Set ``window`` and ``layer_types`` from ``model.attention``, which overrides preset and file."""
    layers = fields["layers"]
    if spec.attention is not None and spec.attention.sinks is not None:
        fields["sinks"] = spec.attention.sinks
    if spec.attention is None or not spec.attention.model_fields_set - {"sinks"}:
        kinds = fields.get("layer_types")
        if kinds and len(kinds) != layers:
            fields["layer_types"] = tuple(kinds[index % len(kinds)] for index in range(layers))
        return []
    window, types = spec.attention.window, spec.attention.layer_types
    if isinstance(types, LayerPattern):
        kinds = tuple(types.pattern[index % len(types.pattern)] for index in range(layers))
    elif types is None:
        kinds = ("sliding",) * layers if window else ()
    else:
        kinds = tuple(types)
    fields["window"], fields["layer_types"] = window or fields.get("window"), kinds
    if fields["window"] is None:
        del fields["window"]
    if spec.attention.grid is not None:
        fields["grid"] = tuple(spec.attention.grid)
    if kinds and len(kinds) != layers:
        text = f"layer_types has {len(kinds)} entries for {layers} layers"
        help = "name every layer, or write {pattern: [...]}"
        return [Diagnostic("PT209", text, path=("model", "attention", "layer_types"), help=help)]
    if "sliding" in kinds and "window" not in fields:
        text = "sliding layers need a window"
        return [Diagnostic("PT207", text, path=("model", "attention"), help="write window: 4096 (tokens)")]
    return []


def _followed_text(followed: dict[str, Any]) -> str:
    """Return the end of a sentence that lists the numbers which follow from the spec's; empty if there are none."""
    plain = {name: value for name, value in followed.items() if isinstance(value, int)}
    return (
        f", and {', '.join(f'{name} {value}' for name, value in sorted(plain.items()))} in proportion" if plain else ""
    )


def _from(kept: Mapping[str, str], *names: str) -> str:
    """Return a remark that says which of the fields come from a preset or a file; empty if none does."""
    given = [name for name in names if name in kept]
    return f" ({' and '.join(given)} from {kept[given[0]]})" if given else ""


def _validated(
    fields: dict[str, Any], findings: list[Diagnostic], kept: Mapping[str, str] = MappingProxyType({})
) -> ModelConfig | None:
    if "head_dim" not in fields:
        text = f"hidden: {fields['hidden']} is not a multiple of heads: {fields['heads']}"
        text += _from(kept, "hidden", "heads")
        findings.append(Diagnostic("PT205", text, path=("model", "hidden"), help="change one, or write head_dim"))
        return None
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            findings.append(Diagnostic("PT253", f"{name}: {item['msg']}", path=("model",)))
        return None


def _padding(config: ModelConfig, token: Any) -> list[Diagnostic]:
    """Return a finding if partool trains the padding token's row of the embedding and transformers would not."""
    if not isinstance(token, int) or config.padding_token is not None or config.position == "learned":
        return []
    text = f"pad_token_id: {token} is a row of the embedding that transformers gives no gradient, and partool does"
    help = f"write padding_token: {token} under model to do the same; it matters where the data hold this token"
    return [Diagnostic("PT691", text, "warning", ("model", "config"), help=help)]


def _inconsistent(config: ModelConfig, kept: Mapping[str, str]) -> list[Diagnostic]:
    """Return findings about fields of the resolved model that contradict each other.

    ``kept`` maps each field that a preset or a file gave to that preset or file, which the findings name. The codes are
    those of the rules about specs, which only see the fields that the spec itself gives.
    """
    findings = []
    if config.heads % config.kv_heads:
        text = f"{config.heads} attention heads cannot share {config.kv_heads} key and value heads evenly"
        text += _from(kept, "heads", "kv_heads")
        near = max(n for n in range(1, config.kv_heads + 1) if config.heads % n == 0)
        help = f"use {near}, or another divisor of {config.heads}"
        findings.append(Diagnostic("PT204", text, path=("model", "kv_heads"), help=help))
    findings.extend(_latent(config, kept))
    findings.extend(_unread(config, kept))
    if config.position == "rope" and config.mla is None and config.head_dim % 2:
        text = f"head_dim: {config.head_dim} is odd, and rotary positions turn pairs of dimensions"
        text += _from(kept, "head_dim")
        findings.append(Diagnostic("PT206", text, path=("model", "head_dim"), help=f"use {config.head_dim + 1}"))
    if config.padding_token is not None and config.padding_token >= config.vocab:
        text = f"padding_token: {config.padding_token} is not below the vocabulary of {config.vocab}"
        text += _from(kept, "vocab", "padding_token")
        findings.append(
            Diagnostic("PT694", text, path=("model", "padding_token"), help=f"use at most {config.vocab - 1}")
        )
    if config.moe is not None and config.moe.top_k > config.moe.experts:
        text = f"top_k: {config.moe.top_k} is more than the {config.moe.experts} experts{_from(kept, 'moe')}"
        help = f"use at most {config.moe.experts}"
        findings.append(Diagnostic("PT210", text, path=("model", "moe", "top_k"), help=help))
    return findings


def _unread(config: ModelConfig, kept: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yield findings about fields that the model's activation or its attention does not read."""
    if config.activation != "swiglu_clamped":
        for name in ("swiglu_limit", "swiglu_alpha"):
            if name in config.model_fields_set:
                text = f"{name}: {getattr(config, name):g} is not read by activation: {config.activation}"
                help = f"drop {name}, or write activation: swiglu_clamped"
                yield Diagnostic("PT402", f"{text}{_from(kept, name)}", path=("model", name), help=help)
    if config.sinks and config.mla is not None:
        text = f"sinks: true is not read by latent attention{_from(kept, 'sinks', 'mla')}"
        yield Diagnostic("PT402", text, path=("model", "attention", "sinks"), help="drop sinks, or mla")


def _latent(config: ModelConfig, kept: Mapping[str, str]) -> list[Diagnostic]:
    """Return findings about fields that contradict latent attention."""
    mla = config.mla
    if mla is None:
        return []
    findings = []
    if config.position == "rope" and mla.rope_head_dim % 2:
        text = f"rope_head_dim: {mla.rope_head_dim} is odd, and rotary positions turn pairs of dimensions"
        help = f"use {mla.rope_head_dim + 1}"
        findings.append(Diagnostic("PT206", text, path=("model", "mla", "rope_head_dim"), help=help))
    wrong = (
        ("head_dim", config.head_dim, mla.qk_head_dim, "nope_head_dim + rope_head_dim"),
        ("kv_heads", config.kv_heads, config.heads, "heads, as every head has keys and values"),
        ("qk_norm", config.qk_norm, False, "false: norms are on the latents"),
    )
    for name, given, needed, why in wrong:
        if given != needed:
            text = f"{name}: {given} contradicts latent attention, where it is {why}{_from(kept, name)}"
            findings.append(Diagnostic("PT239", text, path=("model", name), help=f"drop {name}, or mla"))
    return findings
