"""``partool init``."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from partool.cli._fail import fail
from partool.plan.terminal import say


def command(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("partool.yaml"),
    *,
    preset: Annotated[str | None, typer.Option("--preset", help="Model of the catalog; default a small one.")] = None,
    finetune: Annotated[
        Path | None, typer.Option("--finetune", help="Folder of a Hugging Face model to train further; needs --data.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Conversations, prompts or texts: JSONL, Parquet, a saved data set.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a spec to start from, with remarks and a schema line for editors."""
    from partool.catalog.lookup import table

    presets = list(table("models"))
    if preset is not None and preset not in presets:
        import difflib

        near = difflib.get_close_matches(preset, presets, n=1)
        names = ", ".join(presets)
        fail("PT250", f"there is no preset {preset!r}", f"did you mean {near[0]}?" if near else f"presets: {names}", 2)
    if (finetune is None) != (data is None):
        fail("PT107", "--finetune and --data go together", "init --finetune FOLDER --data FILE", 2)
    text = _starter(preset) if finetune is None or data is None else _finetuning(finetune, data, path)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        fail("PT002", f"{path} is there already", "choose another name, or replace it with --force", 2)
    except OSError as error:
        fail("PT002", f"{path} cannot be written: {error.strerror}", "", 3)
    say(f"wrote {path}; next: partool {'data prepare' if finetune else 'plan'} {path}", err=True)


def _starter(preset: str | None) -> str:
    name = "starter-preset.yaml" if preset else "starter.yaml"
    text = (resources.files("partool.templates") / name).read_text(encoding="utf-8")
    schema = resources.files("partool.spec") / "partool.schema.json"
    return Template(text).substitute(schema=schema, preset=preset or "")


def _finetuning(folder: Path, source: Path, path: Path) -> str:
    """Return a spec that trains a model's folder further; the command ends where folder or data cannot be used."""
    from partool.launch.starting import StartError, finetuning

    try:
        values = finetuning(folder, source, path)
    except StartError as error:
        fail(error.code, str(error), error.help, 2)
    text = (resources.files("partool.templates") / "finetune.yaml").read_text(encoding="utf-8")
    schema = resources.files("partool.spec") / "partool.schema.json"
    return Template(text).substitute(schema=schema, **values)
