"""Checks of ``model.weights`` and ``model.frozen`` against the model, before ranks start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from partool.catalog.huggingface import read_config
from partool.diagnostics.record import Diagnostic, Severity
from partool.layout.adapters import frozen_beside
from partool.layout.parameters import frozen_problem
from partool.layout.tensor.cutting import collapsed_name
from partool.plan.types import TeacherModel
from partool.plan.weight_files import WeightsError, check_weight_file, holds_checkpoint, weight_files
from partool.planner.problem import Problem
from partool.planner.rules.data import lies, of_what_is_here
from partool.planner.rules.optimizer import parameter_names
from partool.spec.adapter import AdapterSpec
from partool.spec.experts import Moe
from partool.spec.launch import LaunchSpec
from partool.spec.model import ModelConfig
from partool.spec.spec import Spec

_PATH = ("model", "weights", "path")
_HELP = {
    "hf": "give a folder on disk; weights of a hub are downloaded first",
    "checkpoint": "give a run's folder, or one of its step-… folders",
}
_SIZES = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "qkv_bias", "tied_embeddings")
"""Fields of a model that decide the names and the shapes of its weights."""
_EXPERT_SIZES = ("experts", "ffn_hidden", "shared_experts", "first_dense_layers", "every")


def check_frozen(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if a pattern of ``model.frozen`` matches no parameter, or if the patterns match all of them."""
    patterns, names = problem.spec.model.frozen, parameter_names(problem)
    mismatch = frozen_problem(names, patterns)
    if mismatch is None:
        return
    index, message = mismatch
    if index is None:
        yield Diagnostic(
            "PT623", message, path=("model", "frozen"), help="drop a pattern, so that something is trained"
        )
        return
    collapsed_names = {collapsed_name(name) for name in names}
    collapsed_names |= {f"{name[:dot]}.*" for name in collapsed_names for dot in range(len(name)) if name[dot] == "."}
    near = get_close_matches(collapsed_name(patterns[index]), sorted(collapsed_names), 2, 0.5)
    help = f"nearest: {' or '.join(near)}" if near else f"names are {', '.join(names[:4])}, …"
    yield Diagnostic("PT623", message, path=("model", "frozen", index), help=help)


def check_weights(spec: Spec, launch: LaunchSpec, model: ModelConfig, base_dir: Path) -> Iterator[Diagnostic]:
    """Yield a finding if the folder of ``model.weights`` is missing or holds no weights, or those of other sizes.

    A missing folder is as severe as a missing data file (:func:`partool.planner.rules.data.lies`); a folder that is
    here and cannot be read is an error. Sizes come from the folder's ``config.json``; ranks compare the weights
    themselves later.
    """
    weights = spec.model.weights
    written = weights.path or (spec.model.hf if weights.source == "hf" else None)
    if written is None or weights.source not in _HELP:
        return
    if weights.upcycle and not spec.model.by_others:
        yield from _copies(model)
    folder = (base_dir / written).expanduser()
    path = _PATH if weights.path else _PATH[:-1]
    if not folder.exists():
        severity, where = lies(spec, launch, str(folder))
        message = f"there is no folder {folder}{where}"
        yield Diagnostic("PT620", message, severity, path, help=_HELP[weights.source])
        return
    severity = of_what_is_here(spec, launch, str(folder))
    yield from _unreadable(folder, weights.source, severity, path)
    if weights.source == "hf" and (folder / "config.json").is_file() and not spec.model.by_others:
        yield from _sizes(folder, model, weights.upcycle, spec.adapter)


def check_teacher(spec: Spec, launch: LaunchSpec, teacher: TeacherModel | None) -> Iterator[Diagnostic]:
    """Yield a finding if the folder of a teacher holds no weights: a warning where ranks on other machines train."""
    path = None if teacher is None else teacher.weights.path
    if teacher is not None and path is not None:
        severity, _ = lies(spec, launch, path)
        yield from _unreadable(Path(path), teacher.weights.source, severity, ("training", "distill", "teacher"))


def _unreadable(folder: Path, source: str, severity: Severity, path: tuple[str, ...]) -> Iterator[Diagnostic]:
    """Yield a finding if a folder on this machine holds no weights of its kind, or some that cannot be read."""
    try:
        if source == "checkpoint" and not holds_checkpoint(folder):
            yield Diagnostic("PT620", f"{folder} holds no checkpoint", severity, path, help=_HELP[source])
        for file in weight_files(folder) if source == "hf" else ():
            check_weight_file(file)
    except WeightsError as error:
        yield Diagnostic("PT620", str(error), severity, path, help=f"{error.help} {_HELP[source]}".strip())
    except OSError as error:
        yield Diagnostic("PT620", f"{folder} cannot be read: {error.strerror}", severity, path, help=_HELP[source])


def _copies(model: ModelConfig) -> Iterator[Diagnostic]:
    """Yield a finding for each field with which experts that are copies do not compute what the dense model does."""
    moe, path = model.moe, ("model", "moe")
    if moe is None:
        message, help = "upcycle: true, and the model has no experts", "write moe: {experts: 8, top_k: 2, …}"
        yield Diagnostic("PT229", message, path=("model", "weights", "upcycle"), help=help)
        return
    keys = [(("layers", key), shape.ffn_hidden) for key, shape in (moe.layers or {}).items() if shape.ffn_hidden]
    for place, width in [((), moe.ffn_hidden), *keys]:
        if width != model.ffn_hidden and width in model.expert_widths:
            message = f"ffn_hidden: {width} of the experts does not fit copies of a dense network"
            help = f"use {model.ffn_hidden}, the width of the dense network"
            yield Diagnostic("PT229", message, path=(*path, *place, "ffn_hidden"), help=help)
    wrong = (
        ("shared_experts", moe.shared_experts, 0, "as tokens use no more than copies"),
        ("normalise", moe.normalise, True, "so that the weights of a token's copies add up to 1"),
        ("scaling_factor", moe.scaling_factor, 1.0, "so that the weights of a token's copies add up to 1"),
        ("bias", moe.bias, False, "as upcycling copies matrices alone"),
    )
    for name, given, needed, why in wrong:
        if given != needed:
            message = f"{name}: {_word(given)} of the experts does not fit copies of a dense network"
            yield Diagnostic("PT229", message, path=(*path, name), help=f"use {_word(needed)}, {why}")
    if model.ffn_bias:
        message = "ffn_bias: true: upcycled experts have no biases, so they cannot be copies of a network that has"
        yield Diagnostic("PT229", message, path=("model", "ffn_bias"), help="start from a model without these biases")


def _sizes(folder: Path, model: ModelConfig, upcycle: bool, adapter: AdapterSpec | None) -> Iterator[Diagnostic]:
    fields, content, _ = read_config(folder)
    if fields is None:
        return
    modules = json.loads(content).get("num_nextn_predict_layers") or 0
    if modules < model.predictions:
        message = f"the weights in {folder} have {modules} modules for further tokens, the model {model.predictions}"
        help = f"use multi_token: {modules}" if modules else "drop multi_token, or give another folder"
        yield Diagnostic("PT638", message, path=("model", "multi_token"), help=help)
        return
    if upcycle and fields.get("moe") is not None:
        message = f"the model in {folder} has experts: there are no dense networks to copy"
        yield Diagnostic("PT229", message, path=_PATH, help="drop upcycle, or give the folder of a dense model")
        return
    if not upcycle and fields.get("moe") is None and model.moe is not None:
        message = f"the model in {folder} is dense, and this one has experts"
        help = "write weights: {…, upcycle: true} to start each expert as a copy of the dense network, or drop moe"
        yield Diagnostic("PT621", message, path=_PATH, help=help)
        return
    if not upcycle:
        yield from _grown(fields, model, adapter)
    differ = [*_different(fields, model, grows=not upcycle), *([] if upcycle else _other_experts(fields, model))]
    if differ:
        message = f"the weights in {folder} do not fit the model: {', '.join(differ)}"
        yield Diagnostic(
            "PT621", message, path=_PATH, help=f"take the model from the folder: model: {{config: {folder}}}"
        )


def _grown(fields: dict[str, Any], model: ModelConfig, adapter: AdapterSpec | None) -> Iterator[Diagnostic]:
    """Yield a finding if the model has more tokens than the folder."""
    rows = model.vocab - (fields.get("vocab") or model.vocab)
    if rows <= 0:
        return
    message = f"the model has {rows:,} tokens more than the weights; their rows start as the mean of the others"
    path = ("model", "vocab")
    entries = ["embed"] if model.tied_embeddings else ["embed", "head"]
    matrices = [f"{name}.weight" for name in entries]
    if adapter is None or not frozen_beside(matrices, adapter.train):
        yield Diagnostic("PT631", message, "note", path)
        return
    help = f"write adapter: {{train: [{', '.join(entries)}]}}"
    yield Diagnostic("PT631", f"{message}, and the adapter leaves them at that", "warning", path, help=help)


def _different(fields: dict[str, Any], model: ModelConfig, *, grows: bool) -> Iterator[str]:
    """Yield text for each size that a folder's configuration gives and that the model has otherwise.

    ``grows`` means that the model may have more tokens.
    """
    for name in _SIZES:
        in_folder, in_model = fields.get(name), getattr(model, name)
        if name == "vocab" and grows and in_folder is not None and in_folder < in_model:
            continue
        if in_folder is not None and in_folder != in_model:
            yield f"{name} is {_word(in_model)} in the model and {_word(in_folder)} in the folder"


def _other_experts(fields: dict[str, Any], model: ModelConfig) -> Iterator[str]:
    """Yield text for each size of experts that a folder's configuration gives and that the model has otherwise."""
    in_folder, in_model = fields.get("moe"), model.moe
    if in_folder is None or in_model is None:
        if in_folder is not None:
            yield "the model is dense, and that in the folder has experts"
        return
    for name in _EXPERT_SIZES:
        expected, given = in_folder.get(name, Moe.model_fields[name].default), getattr(in_model, name)
        if expected != given:
            yield f"moe.{name} is {given} in the model and {expected} in the folder"
    if (in_folder.get("layers") or None) != in_model.model_dump(exclude_none=True).get("layers"):
        yield "the layers whose experts differ (moe.layers) are others in the folder"
    if (in_folder.get("bias_rate") is None) != (in_model.bias_rate is None):
        yield "one of model and folder has selection biases (moe.bias_rate)"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
