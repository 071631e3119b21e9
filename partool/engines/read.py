"""Reads files of other training systems into pinned specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from partool.diagnostics.record import Diagnostic, Span
from partool.engines import deepspeed, deepspeed_keys, megatron, megatron_keys, megatron_unpriced, slurm
from partool.engines.settings import Fate, Sheet, Unpriced, fates, left_out
from partool.engines.shell import ShellScript, Word, split

Engine = Literal["deepspeed", "megatron"]


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


@dataclass(frozen=True)
class Imported:
    """What was read."""

    engine: Engine
    spec: dict[str, Any]
    """The spec as nested sections."""
    fates: list[Fate] = field(default_factory=list)
    findings: list[Diagnostic] = field(default_factory=list)

    @property
    def understood(self) -> float:
        """Share of the settings that are known: carried, without effect, or named in a finding as not priced."""
        known = sum(fate.kind != "not understood" for fate in self.fates)
        return known / len(self.fates) if self.fates else 1.0


def engine_of(text: str) -> Engine | None:
    """Return the engine whose file this is, by its contents."""
    if text.lstrip().startswith("{"):
        return "deepspeed"
    names = ("--num-layers", "--tensor-model-parallel-size", "--micro-batch-size")
    if any(name in text or "--" + name[2:].replace("-", "_") in text for name in names):
        return "megatron"
    return None


def read(path: Path, text: str, engine: Engine, wanted: Wanted) -> Imported:
    """Read a file; nothing in it is executed."""
    if engine == "megatron":
        return _megatron(path, text, wanted)
    settings, findings = deepspeed.settings(path, text)
    if findings:
        return Imported("deepspeed", {}, findings=findings)
    sheet = Sheet(settings, findings)
    world = wanted.nodes * wanted.per_node if wanted.nodes and wanted.per_node else None
    spec = deepspeed.spec_of(sheet, world)
    reasons, others = deepspeed_keys.no_effect(settings), deepspeed_keys.unpriced(settings)
    return _imported("deepspeed", sheet, spec, wanted, no_effect=reasons, unpriced=others)


def _megatron(path: Path, text: str, wanted: Wanted) -> Imported:
    script = ShellScript()
    script.variables |= {name: [Word(value, str(path), 1)] for name, value in slurm.variables(text).items()}
    script.read(path, text)
    command = training_command(script)
    sheet = Sheet(megatron.settings(command))
    for missing in script.missing:
        message = f"{path} sources {missing.text}, which cannot be read"
        way_out = "put the file beside the script if it sets values of the run, or write them into the script"
        span = Span(*_place(missing))
        sheet.findings.append(Diagnostic("PT825", message, "warning", help=way_out, span=span))
    if not command:
        nothing = Diagnostic("PT825", f"{path} has no command with Megatron-LM's arguments", help="name another file")
        return Imported("megatron", {}, findings=[*sheet.findings, nothing])
    if other := megatron.program_of(command):
        message = f"{other.text} trains another kind of model than a decoder of text"
        sheet.findings.append(Diagnostic("PT823", message, help="name another file", span=Span(*_place(other))))
    known = {name: value for name in ("nodes", "per_node") if (value := getattr(wanted, name)) is not None}
    if not known and not any(name in sheet.settings for name in megatron.LAUNCHER):
        known = slurm.hardware(text)
    spec = megatron.spec_of(sheet, known)
    unknown = unresolved(command, sheet, known)
    places = {each.path for each in unknown}
    sheet.findings = [each for each in sheet.findings if each.path not in places or each.code not in ("PT820", "PT822")]
    sheet.findings += unknown
    reasons, others = megatron_keys.no_effect(sheet.settings), megatron_unpriced.UNPRICED
    return _imported("megatron", sheet, spec, wanted, no_effect=reasons, unpriced=others)


def training_command(script: ShellScript) -> list[Word]:
    """Return the command with most arguments that begin with two dashes.

    A file of arguments alone is one command, whatever its lines; a command in quotes (``sh -c "..."``) is read, too.
    """
    commands = [[part for word in words for part in _parts(word)] for words in script.commands]
    if commands and all(words[0].text.startswith("--") for words in commands):
        commands = [[word for words in commands for word in words]]
    dashed = [(sum(word.text.startswith("--") for word in words), words) for words in commands]
    most, found = max(dashed, key=lambda each: each[0], default=(0, []))
    return found if most > 2 else []


def _parts(word: Word) -> Sequence[Word]:
    return list(split(word)) if " --" in word.text else [word]


def _place(word: Word) -> tuple[str, int, int, int, int]:
    return word.file, word.line, 1, word.line, 1


def unresolved(command: Sequence[Word], sheet: Sheet, known: Mapping[str, int]) -> list[Diagnostic]:
    """Return a finding for each argument that is carried and whose value nobody can tell without running the script."""
    found, name = list[Diagnostic](), ""
    for word in command:
        if word.text.startswith("--"):
            name = word.text[2:].partition("=")[0].replace("_", "-")
        name = "" if megatron.SCRIPT.search(word.text) else name
        place = tuple(sheet.carried.get(name, "").split("."))
        if word.unknown and name in sheet.carried and megatron.LAUNCHER.get(name) not in known:
            message = f"--{name} is {word.unknown[0]}, which only running the script would tell"
            way_out = "set the variable in the script, or add --define NAME=VALUE"
            found.append(Diagnostic("PT825", message, path=place, help=way_out, span=Span(*_place(word))))
    return found


def _imported(
    engine: Engine,
    sheet: Sheet,
    spec: dict[str, Any],
    wanted: Wanted,
    *,
    no_effect: Mapping[str, str],
    unpriced: Mapping[str, Unpriced],
) -> Imported:
    left_out(sheet, unpriced)
    hardware = spec.get("hardware", {})
    for name in ("nodes", "per_node", "accelerator"):
        if (value := getattr(wanted, name)) is not None:
            hardware[name] = value
    for name, what in (("accelerator", "which devices there are"), ("per_node", "how many devices a machine has")):
        if name not in hardware:
            sheet.lacks(f"hardware.{name}", f"the files do not say {what}")
    whole: dict[str, Any] = {"spec": 1, "engine": engine}
    if wanted.model is not None:
        key = "config" if wanted.model.endswith(".json") else "preset"
        whole["model"] = {key: wanted.model}
    elif "model" in spec:
        whole["model"] = spec["model"]
    else:
        sheet.lacks("model.preset", "the files do not describe the model")
    whole |= {"hardware": hardware, "training": spec["training"], "parallel": spec["parallel"]}
    whole |= {name: spec[name] for name in ("optimizer",) if name in spec}
    held_out = {"validation": 0.01} if spec["training"].get("validation", {}).get("every") else {}
    whole |= {"data": {"source": "python-stdlib"} | held_out, "kernels": {"mode": "torch"}}
    for path, value in wanted.settings.items():
        _put(whole, path.split("."), value)
    given = {tuple(path.split(".")) for path in wanted.settings}
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
