"""``partool data``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from partool.cli._fail import fail
from partool.cli._load import loaded_or_exit, show
from partool.plan.terminal import open_console, say

if TYPE_CHECKING:
    from partool.planner.data_counts import DataCounts
    from partool.spec.data import DataSpec
    from partool.spec.spec import Spec

_ERRORS, _ENVIRONMENT = 1, 3
_ON_A_PAGE = 3
"""Sequences that a page shows."""


def command(
    action: Annotated[
        Literal["prepare", "show", "stats"],
        typer.Argument(help="prepare: tokenise and count; show: what the model sees; stats: lengths."),
    ],
    spec: Annotated[Path, typer.Argument(help="A spec (YAML).")],
    *,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    sample: Annotated[int, typer.Option("--sample", min=1, help="show: number of the sequence, from 1.")] = 1,
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
    html: Annotated[
        Path | None, typer.Option("--html", help="show, stats: also write lengths and three sequences as a page.")
    ] = None,
) -> None:
    """Tokenise the data of a spec, count them, and show what the model sees."""
    from partool.launch.data import DataProcessError, ask

    loaded, data = _resolved(spec, overrides or [])
    length = loaded.training.sequence_length
    if action == "show" and data.is_text:
        raise typer.BadParameter("show is for conversations, and prompts with completions; these data are texts")
    if html is not None and action == "prepare":
        raise typer.BadParameter("--html is for show and stats")
    shows = action == "show" or (html is not None and not data.is_text)
    wanted = range(sample - 1, sample - 1 + (1 if html is None else _ON_A_PAGE))
    try:
        events = ask("show" if shows else "prepare", data, length, wanted)
    except DataProcessError as error:
        fail(error.code, str(error), error.help, _ERRORS)
    caches = [event for event in events if event["event"] == "cache"]
    rows = [event for event in events if event["event"] == "row"]
    if action == "show" and not rows:
        raise typer.BadParameter(f"--sample {sample}: the data have fewer sequences")
    if html is not None:
        _write_page(html, loaded, data, caches, rows)
    if action == "show":
        _show(rows, output)
    else:
        _count(action, loaded, data, caches, output)


def _resolved(path: Path, overrides: list[str]) -> tuple[Spec, DataSpec]:
    """Return a spec and its data section with absolute paths; the command ends where they have errors."""
    from partool.planner.rules.data import resolve_data
    from partool.planner.rules.launching import resolve_launch

    loaded, _ = loaded_or_exit(path, overrides, "text")
    assert loaded.spec is not None
    folder = path.absolute().parent
    resolved = resolve_data(loaded.spec, resolve_launch(loaded.spec.launch, folder).launch, folder)
    errors = [finding for finding in resolved.findings if finding.severity == "error"]
    if errors:
        show([loaded.source.located(one) for one in errors], dict(loaded.source.texts), "text", failed=True)
        raise typer.Exit(_ERRORS)
    return loaded.spec, resolved.data


def _show(rows: list[dict[str, Any]], output: str) -> None:
    from partool.report.data import row_lines

    if output == "json":
        say(json.dumps(rows[0]))
        return
    console = open_console()
    for line in row_lines(rows[0], console.width):
        console.print(line, soft_wrap=True)


def _count(action: str, spec: Spec, data: DataSpec, caches: list[dict[str, Any]], output: str) -> None:
    from partool.planner.data_counts import count_data
    from partool.report.units import counted

    counts = count_data(data, spec.training.sequence_length, trains=True)
    trained = _trained(caches)
    if output == "json":
        folders = [cache["folder"] for cache in caches]
        say(json.dumps({"caches": folders, "trained": trained, **_as_dict(counts)}))
        return
    if action == "stats":
        from partool.report.data import statistics

        for line in statistics(_lengths(data), counts, trained, spec.training.sequence_length):
            say(line)
        return
    for cache in caches:
        sizes = (counted(cache["files"], "file"), counted(cache["documents"], "document"))
        name = f"set {cache['set']}: " if cache["set"] else ""
        say(f"{name}{', '.join(sizes)}, {cache['tokens']:,} tokens in {cache['folder']}")
        for note in cache["notes"]:
            say(f"  {note}")
        for what, why in (("empty", "hold nothing"), ("masked", "have no token to train on")):
            if cache[what]:
                say(f"  {cache[what]:,} {why}; the first is {cache[f'first_{what}']}")
    if counts.rows:
        steps = -(-counts.rows // spec.training.global_batch)
        say(f"an epoch: {counts.rows:,} sequences, {steps:,} steps of {spec.training.global_batch:,}")
    else:
        say(f"not counted: {counts.unknown or 'the data have no sequence of this length'}")


def _trained(caches: list[dict[str, Any]]) -> int:
    """Return the number of tokens that are trained on in an epoch."""
    return sum(cache["trained"] for cache in caches if cache["trains"])


def _lengths(data: DataSpec) -> list[int]:
    """Return the tokens of each sample that is trained on."""
    from partool.plan.token_cache import prepared

    ready = [prepared(part) for part in data.parts]
    return [size for one in ready if one is not None for size in one.lengths.tokens.tolist()]


def _write_page(
    path: Path, spec: Spec, data: DataSpec, caches: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> None:
    from partool.cli._files import write_or_exit
    from partool.planner.data_counts import count_data
    from partool.report.html_data import render_data_html

    length = spec.training.sequence_length
    counts, name = count_data(data, length, trains=True), spec.name or path.stem
    shown = render_data_html(name, _lengths(data), counts, trained=_trained(caches), length=length, rows=rows)
    write_or_exit(shown, path)
    say(f"partool: wrote {path}", err=True)


def _as_dict(counts: DataCounts) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(counts)
