"""Text for shells: templates, quoting, and the guard of lines that cannot be quoted."""

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
    """A value cannot be written where it would have to go; the spec's patterns refuse all but paths before that."""


@cache
def template(name: str) -> jinja2.Template:
    """Return one of partool's templates; a variable that is not given is an error, not an empty string."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(q=quote, comment=comment)
    return environment.from_string(asset(name))


def asset(name: str) -> str:
    """Return the text of a file among partool's templates."""
    return (resources.files("partool.templates") / name).read_text(encoding="utf-8")


def quote(value: object) -> str:
    r"""Return a word that bash reads as this value.

    Control characters are escaped: sbatch refuses a script with ``\r\n`` in it wherever that stands.
    """
    text = str(value)
    if "\x00" in text:
        raise UnsafeValueError(f"{text!r} holds a NUL, which no process can be given")
    if not any(ord(char) < 32 or char == "\x7f" for char in text):
        return shlex.quote(text)
    return "$'" + "".join(_ESCAPES.get(char) or _escaped(char) for char in text) + "'"


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 32 or char == "\x7f" else char


def comment(text: object) -> str:
    """Return text that stays on the one comment line it is written to."""
    return _CONTROL.sub("?", str(text))


def header_value(value: object, what: str) -> str:
    """Return the value of a line that no quoting can make safe; raises UnsafeValueError where it could break out.

    A blank needs double quotes, which sbatch understands in its header.
    """
    text = str(value)
    if not _HEADER_VALUE.fullmatch(text):
        raise UnsafeValueError(f"{what}: {text!r} cannot be written into the header of a Slurm script")
    return f'"{text}"' if " " in text else text


def variables(plan: Plan) -> list[Variable]:
    """Return what every rank's environment gets from the plan, sorted by name; ``launch.env`` wins.

    Raises UnsafeValueError for a name that a shell would read as more than a name: no quoting helps there.
    """
    for name in (*(each.name for each in plan.environment), *plan.launch.env, *plan.launch.secrets):
        if not fits(VariableName, name):
            raise UnsafeValueError(f"{name!r} cannot be the name of an environment variable")
    found = {variable.name: variable for variable in plan.environment}
    for name, value in plan.launch.env.items():
        if name not in found or found[name].value != value:
            found[name] = Variable(name=name, value=value, origin="launch.env")
    for variable in found.values():
        if not fits(VariableValue, variable.value):
            raise UnsafeValueError(f"{variable.name} holds a NUL, which no process can be given")
    return [found[name] for name in sorted(found)]
