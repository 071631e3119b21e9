"""``partool schema``."""

from __future__ import annotations

import json

from partool.plan.terminal import say
from partool.spec.schema import json_schema


def command() -> None:
    """Print the JSON Schema (draft 7) of specs, for editors and other tools."""
    say(json.dumps(json_schema(), indent=2))
