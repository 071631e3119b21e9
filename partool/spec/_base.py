"""What every section of a spec shares: strict, closed, frozen; and the word ``auto``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Auto = Literal["auto"]


class Section(BaseModel):
    """A section of the YAML file: unknown keys and wrong types are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


def shorthand(field: str, *kinds: type) -> Any:
    """Return a before-validator that reads a bare value as ``{field: value}`` (``model: llama3-8b``); default: text."""

    def expand(value: Any) -> Any:
        return {field: value} if isinstance(value, kinds or str) and not isinstance(value, bool) else value

    return expand
