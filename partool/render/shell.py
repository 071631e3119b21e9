"""Text for shells: templates, quoting, and a check of lines that cannot be quoted."""

from __future__ import annotations

import re
import shlex
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from partool.plan.types import Plan, Variable
from partool.spec.patterns import VariableName, VariableValue, fits

if TYPE_CHECKING:
    import jinja2

_HEADER_VALUE = re.compile(r"[\w .@%+:,=/&|*()\[\]~-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\", "'": "\\'"}


class UnsafeValueError(ValueError):
    """A value cannot be written safely at its place; the spec's patterns refuse such values earlier except in paths."""


@cache
def template(name: str) -> jinja2.Template:
    """Return one of partool's templates; an undefined variable raises an error instead of giving an empty string."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(q=quote, comment=comment)
    return environment.from_string(asset(name))


def asset(name: str) -> str:
    """Return the text of one of partool's template files."""
    return (resources.files("partool.templates") / name).read_text(encoding="utf-8")


def quote(value: object) -> str:
    r"""Return ``value`` quoted as one word of bash.

    Control characters are escaped: sbatch refuses a script with ``\r\n`` anywhere in it.
    """
    text = str(value)
    if "\x00" in text:
        raise UnsafeValueError(f"{text!r} contains a NUL, which no process argument can")
    if not any(ord(char) < 32 or char == "\x7f" for char in text):
        return shlex.quote(text)
    return "$'" + "".join(_ESCAPES.get(char) or _escaped(char) for char in text) + "'"


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 32 or char == "\x7f" else char


def comment(text: object) -> str:
    """Return ``text`` without line ends, so that all of it stays on one comment line."""
    return _CONTROL.sub("?", str(text))


def header_value(value: object, what: str) -> str:
    """Return ``value`` as text for a header line; raises UnsafeValueError if the value could end the line.

    A value with blanks gets double quotes, which sbatch understands in its header.
    """
    text = str(value)
    if not _HEADER_VALUE.fullmatch(text):
        raise UnsafeValueError(f"{what}: {text!r} cannot be written into the header of a Slurm script")
    return f'"{text}"' if " " in text else text


def variables(plan: Plan) -> list[Variable]:
    """Return the environment variables that every rank gets from the plan, sorted by name; ``launch.env`` has priority.

    Raises UnsafeValueError for a name that is not a valid name in a shell: quoting does not help for names.
    """
    for name in (*(each.name for each in plan.environment), *plan.launch.env, *plan.launch.secrets):
        if not fits(VariableName, name):
            raise UnsafeValueError(f"{name!r} cannot be the name of an environment variable")
    by_name = {variable.name: variable for variable in plan.environment}
    for name, value in plan.launch.env.items():
        if name not in by_name or by_name[name].value != value:
            by_name[name] = Variable(name=name, value=value, origin="launch.env")
    for variable in by_name.values():
        if not fits(VariableValue, variable.value):
            raise UnsafeValueError(f"{variable.name} contains a NUL, which no variable can")
    return [by_name[name] for name in sorted(by_name)]
