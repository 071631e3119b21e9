"""Base class of all parts of a plan and of the records of a run, and the reading of records that may be damaged."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
UnixTime = Annotated[float, Field(ge=0, le=253402300799.0)]
"""Unix time up to the year 9999: later times have no date."""


class Record(BaseModel):
    """An immutable part of a plan; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)


class Noted(BaseModel):
    """The part of a run's record that is read: other fields may be there, and values must have their exact type."""

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True, allow_inf_nan=False, strict=True)


class DamagedRecordError(ValueError):
    """A file of a run holds something else than partool writes; the message names the file and the field."""


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text; raises ValueError also for a text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the values are nested too deeply") from None


def damage(error: ValueError, within: str = "") -> str:
    """Return what is wrong with a record: the field, if the record is JSON, and what it must be.

    ``within`` is the name of the field that holds the record; empty for a record that is a file.
    """
    if not isinstance(error, ValidationError):
        return f"it is no JSON: {error}"
    first = error.errors(include_url=False, include_context=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    place = f"{within}{place}".removeprefix(".")
    message = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "missing":
        return f"`{place}` is missing"
    return f"`{place}`: {message}" if place else message
