"""Reads files of other training systems into pinned specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from partool.diagnostics.record import Diagnostic
from partool.engines import (
    accelerate,
    accelerate_files,
    accelerate_keys,
    adapters,
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
from partool.engines.budget import Budget, OverBudgetError
from partool.engines.commands import File, Gathered, script_of, span_of, training_command, unknown_value
from partool.engines.machines import Machines
from partool.engines.others import refusals
from partool.engines.recipes import shortened
from partool.engines.sections import SpecDict
from partool.engines.settings import Fate, Sheet, Unpriced, fates, left_out
from partool.engines.shell import Word
from partool.engines.validated import made_of, wrong_in
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


@dataclass(frozen=True)
class Imported:
    """What was read."""

    engine: Engine
    spec: dict[str, object]
    """The spec as nested sections."""
    fates: list[Fate] = field(default_factory=list)
    findings: list[Diagnostic] = field(default_factory=list)
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of further files that were read, by path."""

    @cached_property
    def several_files(self) -> bool:
        """Whether the settings are of more than one file."""
        return len({fate.setting.file for fate in self.fates}) > 1

    @property
    def understood(self) -> float:
        """Share of the settings that are known: carried, without effect, or named in a finding as not priced."""
        explained = sum(fate.kind != "not understood" for fate in self.fates)
        return explained / len(self.fates) if self.fates else 1.0


def read(path: Path, text: str, engine: Engine, wanted: Wanted, budget: Budget | None = None) -> Imported:
    """Read a file; nothing in it is executed."""
    return read_files([(path, text)], engine, wanted, budget)


def read_files(files: Sequence[File], engine: Engine, wanted: Wanted, budget: Budget | None = None) -> Imported:
    """Read the files of one run; nothing in them is executed.

    ``budget`` says what is left to read for files that they name. The spec is checked against the spec's own rules:
    each error is a finding at the setting that it comes from.
    """
    if refused := refusals(files):
        return Imported(engine, {}, findings=refused)
    try:
        imported = _READERS[engine](files, wanted, budget or Budget())
    except OverBudgetError as error:
        return Imported(engine, {}, findings=[error.finding])
    except RecursionError:
        return Imported(engine, {}, findings=[OverBudgetError("values or expressions are nested too deeply").finding])
    if not imported.spec:
        return imported
    complete = not any(each.severity == "error" for each in imported.findings)
    text, name = yaml.safe_dump(imported.spec, sort_keys=False), made_of([path for path, _ in files])
    return replace(imported, findings=[*imported.findings, *wrong_in(text, name, imported.fates, complete=complete)])


def _ranks(hardware: Mapping[str, int]) -> int | None:
    """Return the number of ranks, if it is known."""
    return hardware["nodes"] * hardware["per_node"] if {"nodes", "per_node"} <= hardware.keys() else None


def _settled(machines: Machines, wanted: Wanted) -> tuple[dict[str, int], list[Diagnostic]]:
    return machines.settled({"nodes": wanted.nodes, "per_node": wanted.per_node}, wanted.settings)


def _deepspeed(files: Sequence[File], wanted: Wanted, budget: Budget) -> Imported:
    settings, findings = deepspeed.settings(*files[0])
    findings += _too_many(files[1:])
    if findings:
        return Imported("deepspeed", {}, findings=findings)
    sheet = Sheet(settings, findings)
    hardware, unsettled = _settled(Machines(), wanted)
    spec = {"hardware": hardware} | deepspeed.spec_of(sheet, _ranks(hardware))
    sheet.findings += unsettled
    reasons, others = deepspeed_keys.no_effect(settings), deepspeed_keys.unpriced(settings)
    return _imported("deepspeed", sheet, spec, wanted, reasons, unpriced=others)


def _megatron(files: Sequence[File], wanted: Wanted, budget: Budget) -> Imported:
    path, text = files[0]
    shell, notes = script_of(path, text, budget)
    command = training_command(shell)
    sheet = Sheet(megatron.settings(command))
    sheet.findings.extend([*notes, *_too_many(files[1:])])
    if not command:
        nothing = Diagnostic("PT825", f"{path} has no command with Megatron-LM's arguments", help="name another file")
        return Imported("megatron", {}, findings=[*sheet.findings, nothing])
    if other := megatron.program_of(command):
        message = f"{other.text} trains another kind of model than a decoder of text"
        sheet.findings.append(Diagnostic("PT823", message, help="name another file", span=span_of(other)))
    machines = megatron.machines_of(sheet, slurm.machines(path, text), command)
    hardware, unsettled = _settled(machines, wanted)
    spec = {"hardware": hardware} | megatron.spec_of(sheet, _ranks(hardware))
    sheet.findings += unsettled
    unknown = _unresolved(command, sheet, hardware)
    places = {each.path for each in unknown}
    sheet.findings = [each for each in sheet.findings if each.path not in places or each.code not in ("PT820", "PT822")]
    script = next((word for word in command if megatron.SCRIPT.search(word.text)), None)
    if script is not None and (other_task := adapters.task(script.text, span_of(script))):
        sheet.findings.append(other_task)
    sheet.findings += [*unknown, *adapters.findings(sheet.settings, ignored=megatron.KNOWN)]
    reasons = megatron_keys.no_effect(sheet.settings)
    return _imported("megatron", sheet, spec, wanted, reasons, unpriced=megatron_unpriced.UNPRICED)


def _unresolved(command: Sequence[Word], sheet: Sheet, hardware: Mapping[str, int]) -> list[Diagnostic]:
    """Return a finding for each argument that is carried and whose value nobody can tell without running the script."""
    findings, name = list[Diagnostic](), ""
    for word in command:
        if word.text.startswith("--"):
            name = word.text[2:].partition("=")[0].replace("_", "-")
        name = "" if megatron.SCRIPT.search(word.text) else name
        if word.unknown and name in sheet.carried and megatron.LAUNCHER.get(name) not in hardware:
            findings.append(unknown_value(name, word, sheet.carried[name]))
    return findings


def _torchtitan(files: Sequence[File], wanted: Wanted, budget: Budget) -> Imported:
    gathered = torchtitan_files.gather(files, wanted.defined, budget)
    sheet = Sheet(gathered.settings)
    if not gathered.settings:
        return Imported("torchtitan", {}, findings=gathered.findings)
    hardware, unsettled = _settled(gathered.machines, wanted)
    spec = {"hardware": hardware} | torchtitan_spec.spec_of(sheet, _ranks(hardware))
    sheet.findings += [*unsettled, *adapters.findings(sheet.settings, ignored=torchtitan_keys.NO_EFFECT)]
    imported = _imported("torchtitan", sheet, spec, wanted, torchtitan_keys.NO_EFFECT)
    return _with_files(gathered, imported, wanted)


def _accelerate(files: Sequence[File], wanted: Wanted, budget: Budget) -> Imported:
    gathered = accelerate_files.gather(files, budget)
    if not gathered.settings:
        return Imported("accelerate", {}, findings=gathered.findings)
    sheet, inner = Sheet(gathered.settings), Sheet(gathered.deepspeed)
    accelerate.machines_of(sheet, gathered.machines)
    hardware, unsettled = _settled(gathered.machines, wanted)
    spec = accelerate.spec_of(sheet, inner, _ranks(hardware), hardware.get("per_node"))
    sheet.findings += unsettled
    left_out(inner, deepspeed_keys.unpriced(inner.settings))
    sheet.findings.extend(inner.findings)
    imported = _imported("accelerate", sheet, {"hardware": hardware} | spec, wanted, accelerate_keys.NO_EFFECT)
    deepspeed_fates = fates(inner, deepspeed_keys.no_effect(inner.settings), deepspeed_keys.unpriced(inner.settings))
    return _with_files(gathered, replace(imported, fates=[*imported.fates, *deepspeed_fates]), wanted)


def _with_files(gathered: Gathered, imported: Imported, wanted: Wanted) -> Imported:
    """Add what was found while files were gathered, unless ``wanted`` answers it."""
    given = {tuple(path.split(".")) for path in wanted.settings}
    kept = [each for each in gathered.findings if each.code != "PT822" or each.path not in given]
    return replace(imported, findings=[*imported.findings, *kept], texts=gathered.texts)


def _too_many(files: Sequence[File]) -> list[Diagnostic]:
    help = "name one file; several are for torchtitan and accelerate"
    return [Diagnostic("PT825", f"{path} is a file too many", help=help) for path, _ in files]


_READERS: Mapping[Engine, Callable[[Sequence[File], Wanted, Budget], Imported]] = {
    "accelerate": _accelerate, "deepspeed": _deepspeed, "megatron": _megatron, "torchtitan": _torchtitan,
}  # fmt: skip


def _imported(
    engine: Engine,
    sheet: Sheet,
    spec: SpecDict,
    wanted: Wanted,
    no_effect: Mapping[str, str],
    *,
    unpriced: Mapping[str, Unpriced] | None = None,
) -> Imported:
    left_out(sheet, unpriced or {})
    hardware: dict[str, object] = dict(spec["hardware"])
    if wanted.accelerator is not None:
        hardware["accelerator"] = wanted.accelerator
    else:
        sheet.lacks("hardware.accelerator", "the files do not say which devices there are")
    full_spec: dict[str, object] = {"spec": 1, "engine": spec.get("engine", engine)}
    if wanted.model is not None:
        key = "config" if wanted.model.endswith(".json") else "preset"
        full_spec["model"] = {key: wanted.model}
    elif "model" in spec:
        full_spec["model"] = spec["model"]
    elif not any(each.path == ("model", "preset") for each in sheet.findings):
        sheet.lacks("model.preset", "the files do not describe the model")
    full_spec |= {"hardware": hardware, "training": spec["training"], "parallel": spec["parallel"]}
    if "optimizer" in spec:
        full_spec["optimizer"] = spec["optimizer"]
    held_out = {"validation": 0.01} if spec["training"].get("validation", {}).get("every") else {}
    full_spec |= {"data": {"source": "python-stdlib"} | held_out, "kernels": {"mode": "torch"}}
    for path, value in wanted.settings.items():
        _put(full_spec, path.split("."), value)
    shortened(sheet, full_spec)
    given = {tuple(path.split(".")) for path in wanted.settings}
    given |= {("model", "preset")} if wanted.model is not None else set()
    answered = ("PT820", "PT822", "PT825")
    findings = [each for each in sheet.findings if each.code not in answered or each.path not in given]
    return Imported(engine, full_spec, fates(sheet, no_effect, unpriced), findings)


def _put(into: dict[str, object], path: Sequence[str], value: Any) -> None:
    """Set a value in nested sections, which are made where they are missing."""
    for name in path[:-1]:
        inner = into.get(name)
        section: dict[str, object] = inner if isinstance(inner, dict) else {}
        into[name] = section
        into = section
    into[path[-1]] = value
