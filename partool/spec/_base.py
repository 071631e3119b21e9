"""What every section of a spec shares: strict, closed, frozen; and the word ``auto``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Auto = Literal["auto"]


class Section(BaseModel):
    """A section of the YAML file: unknown keys and wrong types are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


def shorthand(field: str, *kinds: type, none: tuple[str, ...] = ()) -> Any:
    """Return a before-validator that reads a bare value as ``{field: value}`` (``model: llama3-8b``); default: text.

    ``none``: fields that the word of that name is a value of as well.
    """

    def expand(value: Any) -> Any:
        if not isinstance(value, kinds or str) or isinstance(value, bool):
            return value
        return dict.fromkeys((field, *(none if value == "none" else ())), value)

    return expand
