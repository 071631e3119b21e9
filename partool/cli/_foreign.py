"""Reads a file of another training system where a command expects a spec."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partool.diagnostics.record import Diagnostic
from partool.spec.foreign import foreign_file
from partool.spec.loader import Loaded, load, load_text, read

if TYPE_CHECKING:
    from partool.engines.settings import Setting

_SPEC = (".yaml", ".yml")
_NOT_SPEC = re.compile(r"^(distributed_type|compute_environment|per_device_train_batch_size) *:", re.M)
"""Matches YAML of accelerate or of TrainingArguments."""
_TOLD = {"hardware.accelerator": "accelerator", "hardware.nodes": "nodes", "hardware.per_node": "per_node"}
_MODELS = ("model", "model.preset", "model.config")


@dataclass
class Known:
    """A file's settings, by name, and the fields of the spec that they became; empty for a spec."""

    settings: dict[str, Setting] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)


def is_plan(path: Path) -> bool:
    """Return True for a file that holds a plan: JSON, but not a configuration of DeepSpeed."""
    return path.suffix == ".json" and not _is_foreign(path)


def load_any(path: Path, overrides: Sequence[str]) -> tuple[Loaded, Known]:
    """Read a spec, or make one from a file of another training system; ``overrides`` say what the file does not.

    Findings about the file have its lines; findings about the spec made from it have those of the spec's text.
    """
    if not _is_foreign(path):
        return load(path, list(overrides)), Known()
    from partool.engines import Wanted, engine_of_all, read_files
    from partool.engines.told import findings_of, given, spec_text

    text = read(path)
    if isinstance(text, Diagnostic):
        return load(path, list(overrides)), Known()
    engine = engine_of_all([text])
    if engine is None:
        return load(path, list(overrides)), Known()
    values = given(overrides)
    told: dict[str, Any] = {name: values.pop(key) for key, name in _TOLD.items() if key in values}
    model = next((str(values.pop(key)) for key in _MODELS if key in values), None)
    found = read_files([(path, text)], engine, Wanted(**told, model=model, settings=values))
    findings = findings_of(found)
    loaded = Loaded(None, load_text("", str(path)).source, findings)
    if not any(finding.severity == "error" for finding in findings):
        loaded = load_text(spec_text(found, path), f"the spec of {path}")
        loaded.diagnostics[:0] = findings
    settings = {fate.setting.name: fate.setting for fate in found.fates}
    return loaded, Known(settings, {fate.setting.name: fate.text for fate in found.fates if fate.kind == "carried"})


def _is_foreign(path: Path) -> bool:
    if path.suffix == ".json":
        told = foreign_file(path)
        return told is not None and "DeepSpeed" in told[0]
    if path.suffix not in _SPEC:
        return path.is_file()
    text = read(path)
    return isinstance(text, str) and bool(_NOT_SPEC.search(text))
