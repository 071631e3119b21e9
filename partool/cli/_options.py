"""Commands whose options are one dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Return a decorator for a command that takes ``options``, a dataclass, in place of a parameter for each option.

    The fields are annotated as typer's parameters (https://typer.tiangolo.com/tutorial/options/), in the order in which
    ``--help`` lists them. typer reads a function's signature, so the result has one parameter for each field.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**values: Any) -> None:
            command(options(**values))

        called: Any = call
        called.__signature__ = inspect.Signature(parameters)
        called.__annotations__ = hints
        return call

    return decorate
