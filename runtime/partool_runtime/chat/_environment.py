"""The environment in which chat templates run: Jinja's sandbox, with what templates of model folders expect in it.

Settings, filters and functions are those of transformers 5.24 (``transformers/utils/chat_template_utils.py``), so that
a template renders here as it does there.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class GenerationTag(Extension):
    """The tag ``{% generation %} ... {% endgeneration %}``, around text that the model has to write.

    ``spans`` are the marked pieces of the rendering that runs: start and end in characters, and the text.
    """

    tags = {"generation"}

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.occurs = False
        self.position = 0
        self.spans: list[tuple[int, int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the tag into a call of ``_mark`` with the tag's body."""
        self.occurs = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.spans.append((self.position, self.position + len(text), text))
        return text

    def pieces(self, template: Template, variables: dict[str, Any]) -> Iterator[str]:
        """Yield the pieces of a rendering, and keep the position at which the next piece begins."""
        self.position, self.spans = 0, []
        for piece in template.generate(variables):
            yield piece
            self.position += len(piece)


class _Dict:
    """``dict`` for templates: the class itself would lead a template to Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _public(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a chat template may not keep {name!r} in a namespace: the name begins with _")


class _Namespace(Namespace):
    """Jinja's ``namespace`` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without `self`, so that a template may name a value so
        values = dict(*args[1:], **kwargs)
        for name in values:
            _public(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON. Jinja's filter of this name writes ``<`` as an escape, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compiled(source: str, date: datetime.date) -> tuple[Template, GenerationTag]:
    """Return a template and its marks; ``strftime_now`` gives ``date``. Raises ``jinja2.TemplateError``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    midnight = datetime.datetime.combine(date, datetime.time())
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        {"raise_exception": _refuse, "strftime_now": midnight.strftime, "dict": _Dict(), "namespace": _Namespace}
    )
    template = environment.from_string(source)
    marks = next(one for one in environment.extensions.values() if isinstance(one, GenerationTag))
    return template, marks
