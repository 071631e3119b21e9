"""Texts that do harm if a shell, Slurm or a path interprets them, and every field that takes text."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Union

from pydantic import BaseModel

from partool.spec._base import OneOf

Path_ = tuple[str | int, ...]
CANARY = "canary"
"""File that appears in the scripts' working folder if a harmful text is executed."""
HARM = [
    f"x$(touch {CANARY})",
    f"x`touch {CANARY}`",
    f"x; touch {CANARY} #",
    f"x' ; touch {CANARY}; '",
    f'x" ; touch {CANARY}; "',
    f"x\ntouch {CANARY}\n",
    f"x\r\n#SBATCH --wrap=touch\ntouch {CANARY}",
    f"x && touch {CANARY} | tee {CANARY} &",
    f"$'\\x27'; touch {CANARY}",
    f"\\'; touch {CANARY}; \\'",
    f"x}}; touch {CANARY}; {{",
    f"{{{{ ''.__class__ }}}}$(touch {CANARY})",
    f"-x$(touch {CANARY})",
    "x\u2028\u0085touch\u00a0" + CANARY,
    "naïve-名前-🚀",
    "n" * 300,
    "/" + "n" * 300,
    "-n",
    "",
    "%j",
]
MARK = "\x00"
"""Placeholder for the text."""
REQUIRED = {"source": "/data", "target": "/data", "key": "k", "resource": "rdma/x", "level": "rack"}


def fields(model: type[BaseModel], place: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield every place of a section that takes text, and the section's data with MARK in that place."""
    required = {name: REQUIRED[name] for name, field in model.model_fields.items() if field.is_required()}
    for name, field in model.model_fields.items():
        if any(isinstance(each, OneOf) for each in field.metadata):
            continue  # takes one of some names, not any text
        for inner, value in texts(field.annotation, (*place, name)):
            yield inner, required | {name: value}


def texts(annotation: Any, place: Path_) -> Iterator[tuple[Path_, Any]]:
    """Yield every place within a field that takes text, and the field's data with MARK in that place."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from texts(arguments[0], place)
    elif annotation is str:
        yield place, MARK
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from texts(argument, place)
    elif origin is dict:
        for inner, value in texts(arguments[1], (*place, "VALUE")):
            yield inner, {"name": value}
        yield (*place, "KEY"), {MARK: {} if isinstance(arguments[1], type) else "x"}
    elif origin in (list, tuple):
        for inner, value in texts(arguments[0], (*place, 0)):
            yield inner, [value]
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from fields(annotation, place)


def filled(data: Any, text: str) -> Any:
    """Return data with a text in place of MARK."""
    if isinstance(data, dict):
        return {filled(key, text): filled(value, text) for key, value in data.items()}
    if isinstance(data, list):
        return [filled(value, text) for value in data]
    return text if data == MARK else data
