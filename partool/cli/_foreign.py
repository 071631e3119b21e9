"""Reads a file of another training system where a command expects a spec."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from partool.diagnostics.record import Diagnostic
from partool.spec.foreign import foreign_file
from partool.spec.loader import Loaded, load, load_text, read
from partool.strategies.engines import ENGINES

if TYPE_CHECKING:
    from partool.engines.settings import Setting

_SPEC = (".yaml", ".yml")
_NOT_SPEC = re.compile(r"""^([ \t{]*"|)(distributed_type|compute_environment|per_device_train_batch_size)"? *:""", re.M)
"""Matches YAML or JSON of accelerate or of TrainingArguments."""
_MODELS = ("model", "model.preset", "model.config")


@dataclass
class Known:
    """A file's settings, by name, and the fields of the spec that they became; empty for a spec."""

    settings: dict[str, Setting] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)


def is_plan(path: Path) -> bool:
    """Return True for a file that holds a plan: JSON, but not a configuration of another training system."""
    return path.suffix == ".json" and not _is_foreign(path)


def one_run(paths: Sequence[Path]) -> bool:
    """Return True if files belong to one run of another training system, so that they are read together."""
    from partool.engines import engine_of_all

    texts = [read(path) for path in paths if _is_foreign(path)]
    readable = [text for text in texts if isinstance(text, str)]
    return len(readable) == len(paths) and engine_of_all(readable) is not None


def load_any(path: Path, overrides: Sequence[str], also: Sequence[Path] = ()) -> tuple[Loaded, Known]:
    """Read a spec, or make one from a file of another training system; ``overrides`` say what the file does not.

    ``also`` are the further files of its run (:func:`one_run`). Findings about the files have their lines; findings
    about the spec made from them have those of the spec's text.
    """
    if not _is_foreign(path):
        loaded = load(path, list(overrides))
        return (loaded if loaded.spec is not None else _refused(path) or loaded), Known()
    from partool.engines import Wanted, engine_of_all, read_files
    from partool.engines.imported import findings_of, given, spec_text
    from partool.engines.validated import made_of

    files = [(each, text) for each in (path, *also) if isinstance(text := read(each), str)]
    if not files:
        return load(path, list(overrides)), Known()
    if refused := _refused(path, *also):
        return refused, Known()
    engine = engine_of_all([text for _, text in files])
    if engine is None:
        return _unknown(path, files[0][1], overrides), Known()
    values = given(overrides)
    accelerator = values.pop("hardware.accelerator", None)
    model = next((str(values.pop(key)) for key in _MODELS if key in values), None)
    imported = read_files(files, engine, Wanted(accelerator, model=model, settings=values))
    findings = findings_of(imported)
    loaded = Loaded(None, load_text("", str(path)).source, findings)
    if not any(finding.severity == "error" for finding in findings):
        names = [shlex.quote(str(each)) for each, _ in files]
        loaded = load_text(spec_text(imported, path, *also), made_of(names))
        loaded.diagnostics[:0] = findings
    settings = {fate.setting.name: fate.setting for fate in imported.fates}
    return loaded, Known(settings, {fate.setting.name: fate.text for fate in imported.fates if fate.kind == "carried"})


def _refused(*paths: Path) -> Loaded | None:
    """Return what is said of files of systems that are not imported; None if there are none."""
    from partool.engines.others import refusals

    findings = refusals([(path, text) for path in paths if isinstance(text := read(path), str)])
    return Loaded(None, load_text("", str(paths[0])).source, findings) if findings else None


def _unknown(path: Path, text: str, overrides: Sequence[str]) -> Loaded:
    """Return what is said of a file that has no suffix of a spec, and that no training system is known to have."""
    from partool.engines.kinds import LOOKED_FOR, kind_of

    if kind_of(text) in ("json", "yaml"):
        return load(path, list(overrides))
    titles = [record.title for record in ENGINES.values() if record.stack is not None]
    message = f"{path} is neither a spec nor a file of {', '.join(titles[:-1])} or {titles[-1]}"
    return Loaded(None, load_text("", str(path)).source, [Diagnostic("PT825", message, help=LOOKED_FOR)])


def _is_foreign(path: Path) -> bool:
    if path.suffix == ".json":
        refusal = foreign_file(path)
        if refusal is not None:
            return "DeepSpeed" in refusal[0]
    elif path.suffix not in _SPEC:
        return path.is_file()
    text = read(path)
    return isinstance(text, str) and bool(_NOT_SPEC.search(text))
