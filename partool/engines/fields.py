"""What the fields of a spec can hold, by their paths: the spec's own types say it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from partool.spec.spec import Spec


def complaint(path: str, value: float) -> str | None:
    """Return why the field at ``path`` cannot hold a number; None if it can, or if it is no field of numbers."""
    field = _field(path)
    if field is None:
        return None
    try:
        field.validate_python(value)
    except ValidationError as error:
        reasons = error.errors(include_url=False, include_context=False, include_input=False)
        # A field that may also be a word, as auto, complains of that first or last.
        reason = next((each["msg"] for each in reasons if each["type"] != "literal_error"), reasons[0]["msg"])
        return reason.replace("Input should be", "it should be").replace("Input should", "it should")
    return None


@cache
def _field(path: str) -> TypeAdapter[Any] | None:
    section: type[BaseModel] = Spec
    *sections, last = path.split(".")
    for name in sections:
        info = section.model_fields.get(name)
        inner = next(_sections(info.annotation), None) if info is not None else None
        if inner is None:
            return None
        section = inner
    info = section.model_fields.get(last)
    if info is None or not _is_number(info.annotation):
        return None
    kind: Any = info.annotation
    for limit in info.metadata:
        kind = Annotated[kind, limit]
    return TypeAdapter(kind)


def _is_number(annotation: Any) -> bool:
    """Return whether a field may be a number."""
    if annotation in (int, float):
        return True
    if get_origin(annotation) is Literal:
        return any(isinstance(each, int) for each in get_args(annotation))
    inside = get_origin(annotation) in (Annotated, Union, UnionType)
    return inside and any(_is_number(each) for each in get_args(annotation))


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
