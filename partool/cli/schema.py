"""``partool schema``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from partool.plan.terminal import say
from partool.spec.schema import json_schema


def command(
    *,
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference of all fields, as a page.")] = False,
) -> None:
    """Print the JSON Schema (draft 7) of specs, for editors and other tools."""
    if markdown:
        from partool.spec.reference import reference

        say(reference(), nl=False)
        return
    say(json.dumps(json_schema(), indent=2))
