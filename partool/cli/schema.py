"""``partool schema``."""

from __future__ import annotations

import json

import typer

from partool.spec.schema import json_schema


def command() -> None:
    """Print the JSON Schema (draft 7) of specs, for editors and other tools."""
    typer.echo(json.dumps(json_schema(), indent=2))
