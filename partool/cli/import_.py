"""``partool import``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from partool.catalog.lookup import did_you_mean, table
from partool.cli._fail import fail
from partool.cli._files import write_or_exit
from partool.diagnostics.text import columns_of, render_text, summary, wants_colour
from partool.engines import Engine, Imported, Wanted, engine_of_all, kind_of, read_files
from partool.engines.budget import Budget, OverBudgetError, UnreadableFileError
from partool.engines.imported import findings_of, given, line_of, spec_text
from partool.engines.kinds import LOOKED_FOR
from partool.engines.others import refusals
from partool.plan.terminal import say


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Configurations and scripts of one run of another training system."),
    ],
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the spec to this file.")] = None,
    engine: Annotated[Engine | None, typer.Option("--engine", help="Whose file it is, if it does not show.")] = None,
    accelerator: Annotated[
        str | None, typer.Option("--accelerator", help="Device of the catalog, as h100-sxm.")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Machines, if no file says it.")] = None,
    per_node: Annotated[int | None, typer.Option("--per-node", min=1, help="Devices per machine, likewise.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Preset, or a Hugging Face config.json.")] = None,
    define: Annotated[
        list[str] | None,
        typer.Option("--define", help="NAME=VALUE, a variable that the script leaves open; repeatable."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, a field of the spec over the files'; repeatable.")
    ] = None,
    source_folder: Annotated[
        list[Path] | None,
        typer.Option("--source-folder", help="Folder, besides the script's own, of files that it sources; repeatable."),
    ] = None,
    settings: Annotated[bool, typer.Option("--settings", help="List what becomes of every setting.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Read a run of another training system into a spec of exactly its layout. Nothing in the files is executed."""
    _refuse_unknown(accelerator, model, overrides or [])
    budget = Budget(source_folders=tuple(source_folder or ()))
    files = [(path, _text(path, budget)) for path in paths]
    for refused in refusals(files):
        fail(refused.code, refused.message, refused.help, 2)
    found_engine = engine or _engine(files)
    if out is not None and out.exists() and not force:
        fail("PT002", f"{out} is there already", "choose another name, or replace it with --force", 2)
    defined, given = dict(each.partition("=")[::2] for each in define or []), _given(overrides or [])
    before = "".join(f"{each}; " for each in define or [])
    files = [(path, before + text if kind_of(text) == "script" else text) for path, text in files]
    imported = read_files(files, found_engine, Wanted(accelerator, nodes, per_node, model, given, defined), budget)
    texts = {**imported.texts, **{str(path): text for path, text in files}}
    _show(imported, texts, everything=settings)
    if not imported.spec or any(finding.severity == "error" for finding in imported.findings):
        raise typer.Exit(1)
    spec = spec_text(imported, *paths)
    if out is None:
        say(spec, nl=False)
    else:
        write_or_exit(spec, out)
        say(f"wrote {out}; next: partool plan {shlex.quote(str(out))}", err=True)


def _refuse_unknown(accelerator: str | None, model: str | None, overrides: list[str]) -> None:
    """End the command if the catalog does not have a device or a model that the user names."""
    devices, presets = [*table("accelerators"), "cpu", "auto"], table("models")
    stated = any(each.startswith("hardware.memory_gib=") for each in overrides)
    if accelerator is not None and accelerator not in devices and not stated:
        fail("PT260", f"the catalog has no accelerator {accelerator!r}", did_you_mean(accelerator, devices), 2)
    if model is not None and model not in presets and not model.endswith(".json"):
        help = f"{did_you_mean(model.rpartition('/')[2], presets)} Or name a Hugging Face config.json."
        fail("PT250", f"there is no model preset {model!r}", help, 2)


def _engine(files: list[tuple[Path, str]]) -> Engine:
    engine = engine_of_all([text for _, text in files])
    if engine is None:
        names = " and ".join(str(path) for path, _ in files)
        what = "is of no training system that is known here" if len(files) == 1 else "are not of one training system"
        fail("PT825", f"{names} {what}", f"say which: --engine deepspeed; {LOOKED_FOR}", 2)
    return engine


def _given(overrides: list[str]) -> dict[str, Any]:
    try:
        return given(overrides)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _text(path: Path, budget: Budget) -> str:
    try:
        return budget.read(path)
    except UnreadableFileError as error:
        fail("PT001", f"{path} cannot be read: {error}", "", 2)
    except OverBudgetError as error:
        fail(error.finding.code, error.finding.message, error.finding.help, 2)


def _show(imported: Imported, texts: Mapping[str, str], *, everything: bool) -> None:
    """Print findings, the settings that nobody knows, and how many settings became what."""
    findings = findings_of(imported)
    if findings:
        sources = {path: text.splitlines() for path, text in texts.items()}
        shown = render_text(findings, sources, colour=wants_colour(sys.stderr), columns=columns_of(sys.stderr))
        say(shown + summary(findings), err=True, painted=True)
    if everything:
        for fate in imported.fates:
            text = f": {fate.text}" if fate.text else ""
            say(f"{line_of(fate.setting, imported)}  {fate.setting.name}  {fate.kind}{text}", err=True)
    kinds = [fate.kind for fate in imported.fates]
    ways = ("carried", "no effect", "not priced", "not understood")
    counts = ", ".join(f"{sum(kind == way for kind in kinds)} {way}" for way in ways)
    say(f"{imported.engine}: {len(kinds)} settings, {counts}", err=True)
