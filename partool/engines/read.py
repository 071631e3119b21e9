"""Reads files of other training systems into pinned specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partool.diagnostics.record import Diagnostic
from partool.engines import (
    accelerate,
    accelerate_files,
    accelerate_keys,
    deepspeed,
    deepspeed_keys,
    megatron,
    megatron_keys,
    megatron_unpriced,
    slurm,
    torchtitan_files,
    torchtitan_keys,
    torchtitan_spec,
)
from partool.engines.commands import File, Gathered, missing_sources, span_of, training_command, unknown_value
from partool.engines.recipes import shortened
from partool.engines.settings import Fate, Sheet, Unpriced, fates, left_out
from partool.engines.shell import ShellScript, Word
from partool.strategies.engines import Engine


@dataclass(frozen=True)
class Wanted:
    """What the files of an engine do not say; None where they do, or where nobody has said it."""

    accelerator: str | None = None
    nodes: int | None = None
    per_node: int | None = None
    model: str | None = None
    """Preset, or path of a Hugging Face ``config.json``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values by their paths in the spec, over those of the files."""
    defined: Mapping[str, str] = field(default_factory=dict)
    """Variables that scripts leave open, by name."""

    def world(self, hardware: Mapping[str, Any]) -> int | None:
        """Return the number of ranks, if it is known; ``hardware`` has what the files say."""
        nodes = self.settings.get("hardware.nodes", self.nodes or hardware.get("nodes", 1))
        per_node = self.settings.get("hardware.per_node", self.per_node or hardware.get("per_node"))
        return nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else None


@dataclass(frozen=True)
class Imported:
    """What was read."""

    engine: Engine
    spec: dict[str, Any]
    """The spec as nested sections."""
    fates: list[Fate] = field(default_factory=list)
    findings: list[Diagnostic] = field(default_factory=list)
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of further files that were read, by path."""

    @property
    def understood(self) -> float:
        """Share of the settings that are known: carried, without effect, or named in a finding as not priced."""
        known = sum(fate.kind != "not understood" for fate in self.fates)
        return known / len(self.fates) if self.fates else 1.0


def read(path: Path, text: str, engine: Engine, wanted: Wanted) -> Imported:
    """Read a file; nothing in it is executed."""
    return read_files([(path, text)], engine, wanted)


def read_files(files: Sequence[File], engine: Engine, wanted: Wanted) -> Imported:
    """Read the files of one run; nothing in them is executed."""
    return _READERS[engine](files, wanted)


def _deepspeed(files: Sequence[File], wanted: Wanted) -> Imported:
    settings, findings = deepspeed.settings(*files[0])
    findings += _too_many(files[1:])
    if findings:
        return Imported("deepspeed", {}, findings=findings)
    sheet = Sheet(settings, findings)
    world = wanted.nodes * wanted.per_node if wanted.nodes and wanted.per_node else None
    spec = deepspeed.spec_of(sheet, world)
    reasons, others = deepspeed_keys.no_effect(settings), deepspeed_keys.unpriced(settings)
    return _imported("deepspeed", sheet, spec, wanted, reasons, unpriced=others)


def _megatron(files: Sequence[File], wanted: Wanted) -> Imported:
    path, text = files[0]
    script = ShellScript()
    script.variables |= {name: [Word(value, str(path), 1)] for name, value in slurm.variables(text).items()}
    script.read(path, text)
    command = training_command(script)
    sheet = Sheet(megatron.settings(command))
    sheet.findings.extend([*missing_sources(path, script), *_too_many(files[1:])])
    if not command:
        nothing = Diagnostic("PT825", f"{path} has no command with Megatron-LM's arguments", help="name another file")
        return Imported("megatron", {}, findings=[*sheet.findings, nothing])
    if other := megatron.program_of(command):
        message = f"{other.text} trains another kind of model than a decoder of text"
        sheet.findings.append(Diagnostic("PT823", message, help="name another file", span=span_of(other)))
    known = {name: value for name in ("nodes", "per_node") if (value := getattr(wanted, name)) is not None}
    if not known and not any(name in sheet.settings for name in megatron.LAUNCHER):
        known = slurm.hardware(text)
    spec = megatron.spec_of(sheet, known)
    unknown = _unresolved(command, sheet, known)
    places = {each.path for each in unknown}
    sheet.findings = [each for each in sheet.findings if each.path not in places or each.code not in ("PT820", "PT822")]
    sheet.findings += unknown
    reasons = megatron_keys.no_effect(sheet.settings)
    return _imported("megatron", sheet, spec, wanted, reasons, unpriced=megatron_unpriced.UNPRICED)


def _unresolved(command: Sequence[Word], sheet: Sheet, known: Mapping[str, int]) -> list[Diagnostic]:
    """Return a finding for each argument that is carried and whose value nobody can tell without running the script."""
    found, name = list[Diagnostic](), ""
    for word in command:
        if word.text.startswith("--"):
            name = word.text[2:].partition("=")[0].replace("_", "-")
        name = "" if megatron.SCRIPT.search(word.text) else name
        if word.unknown and name in sheet.carried and megatron.LAUNCHER.get(name) not in known:
            found.append(unknown_value(name, word, sheet.carried[name]))
    return found


def _torchtitan(files: Sequence[File], wanted: Wanted) -> Imported:
    gathered = torchtitan_files.gather(files, wanted.defined)
    sheet = Sheet(gathered.settings)
    if not gathered.settings:
        return Imported("torchtitan", {}, findings=gathered.findings)
    spec = torchtitan_spec.spec_of(sheet, wanted.world(gathered.hardware))
    return _with_files(gathered, _imported(
        "torchtitan", sheet, {"hardware": gathered.hardware} | spec, wanted, torchtitan_keys.NO_EFFECT
    ), wanted)  # fmt: skip


def _accelerate(files: Sequence[File], wanted: Wanted) -> Imported:
    gathered = accelerate_files.gather(files)
    if not gathered.settings:
        return Imported("accelerate", {}, findings=gathered.findings)
    sheet, inner = Sheet(gathered.settings), Sheet(gathered.deepspeed)
    hardware = accelerate.hardware_of(sheet, gathered.hardware)
    spec = accelerate.spec_of(sheet, inner, wanted.world(hardware), wanted.per_node or hardware.get("per_node"))
    left_out(inner, deepspeed_keys.unpriced(inner.settings))
    sheet.findings.extend(inner.findings)
    found = _imported("accelerate", sheet, {"hardware": hardware} | spec, wanted, accelerate_keys.NO_EFFECT)
    own = fates(inner, deepspeed_keys.no_effect(inner.settings), deepspeed_keys.unpriced(inner.settings))
    return _with_files(gathered, replace(found, fates=[*found.fates, *own]), wanted)


def _with_files(gathered: Gathered, found: Imported, wanted: Wanted) -> Imported:
    """Add what was found while files were gathered; numbers of machines that are given count over the files'."""
    given: set[tuple[str | int, ...]] = {
        ("hardware", name) for name in ("nodes", "per_node") if getattr(wanted, name) is not None
    }
    given |= {tuple(path.split(".")) for path in wanted.settings}
    kept = [each for each in gathered.findings if each.code != "PT822" or each.path not in given]
    return replace(found, findings=[*found.findings, *kept], texts=gathered.texts)


def _too_many(files: Sequence[File]) -> list[Diagnostic]:
    help = "name one file; several are for torchtitan and accelerate"
    return [Diagnostic("PT825", f"{path} is a file too many", help=help) for path, _ in files]


_READERS: Mapping[Engine, Callable[[Sequence[File], Wanted], Imported]] = {
    "accelerate": _accelerate, "deepspeed": _deepspeed, "megatron": _megatron, "torchtitan": _torchtitan,
}  # fmt: skip


def _imported(
    engine: Engine,
    sheet: Sheet,
    spec: dict[str, Any],
    wanted: Wanted,
    no_effect: Mapping[str, str],
    *,
    unpriced: Mapping[str, Unpriced] | None = None,
) -> Imported:
    left_out(sheet, unpriced or {})
    hardware = spec.get("hardware", {})
    for name in ("nodes", "per_node", "accelerator"):
        if (value := getattr(wanted, name)) is not None:
            hardware[name] = value
    for name, what in (("accelerator", "which devices there are"), ("per_node", "how many devices a machine has")):
        if name not in hardware:
            sheet.lacks(f"hardware.{name}", f"the files do not say {what}")
    whole: dict[str, Any] = {"spec": 1, "engine": spec.get("engine", engine)}
    if wanted.model is not None:
        key = "config" if wanted.model.endswith(".json") else "preset"
        whole["model"] = {key: wanted.model}
    elif "model" in spec:
        whole["model"] = spec["model"]
    elif not any(each.path == ("model", "preset") for each in sheet.findings):
        sheet.lacks("model.preset", "the files do not describe the model")
    whole |= {"hardware": hardware, "training": spec["training"], "parallel": spec["parallel"]}
    whole |= {name: spec[name] for name in ("optimizer",) if name in spec}
    held_out = {"validation": 0.01} if spec["training"].get("validation", {}).get("every") else {}
    whole |= {"data": {"source": "python-stdlib"} | held_out, "kernels": {"mode": "torch"}}
    for path, value in wanted.settings.items():
        _put(whole, path.split("."), value)
    shortened(sheet, whole)
    given = {tuple(path.split(".")) for path in wanted.settings}
    given |= {("model", "preset")} if wanted.model is not None else set()
    answered = ("PT820", "PT822", "PT825")
    findings = [each for each in sheet.findings if each.code not in answered or each.path not in given]
    return Imported(engine, whole, fates(sheet, no_effect, unpriced), findings)


def _put(into: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value in nested sections, which are made where they are missing."""
    for name in path[:-1]:
        inner = into.get(name)
        into[name] = inner if isinstance(inner, dict) else {}
        into = into[name]
    into[path[-1]] = value
