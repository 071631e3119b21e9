"""Reads YAML 1.2 and notes positions; reports all findings at once and raises no exception."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from partool.diagnostics.record import Diagnostic, Label, Span
from partool.diagnostics.secrets import MASK
from partool.spec._source import Source, SpecPath, is_secret

Scalar = str | int | float | bool | None

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = {".nan", ".NaN", ".NAN"}
_LONGEST_NUMBER = 400  # longer runs of digits are text: no field holds such a number


def resolve(text: str) -> Scalar:
    """Return the value of an unquoted scalar: ``on`` and ``1:30:00`` are strings, ``1e-4`` is a float."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    for pattern, base in ((_INT, 10), (_OCTAL, 8), (_HEX, 16)):
        if pattern.fullmatch(text):
            return int(text if base == 10 else text[2:], base)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INF.fullmatch(text):
        return float("-inf" if text.startswith("-") else "inf")
    return float("nan") if text in _NAN else text


MAX_DEPTH = 32
MAX_NODES = 20_000
"""Largest number of values in a spec after aliases are expanded; sensible specs have at most a few hundred."""

_LARGEST_INT = 2**63 - 1
_LARGEST = 1e300
"""Largest float; products of two larger settings would overflow."""

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Loader that does not resolve unquoted scalars, so that every tag on a node was written by the user."""

    yaml_implicit_resolvers: dict[str, Any] = {}


_STR, _SEQ, _MAP = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


def parse(source: Source) -> tuple[Any, list[Diagnostic]]:
    """Return the document as plain values, with positions noted in ``source``; None after a syntax error."""
    if (at := next((i for i, c in enumerate(source.text) if "\ud800" <= c <= "\udfff"), -1)) >= 0:
        return None, [_finding_at(source, at, "PT004", "this is not UTF-8 text", "save it as UTF-8")]
    try:
        if finding := _too_deep(source):
            return None, [finding]
        nodes = list(_documents(source.text))
    except yaml.YAMLError as error:
        return None, [_syntax_error(source, error)]
    if len(nodes) > 1:
        message = f"the file holds {len(nodes)} YAML documents; a spec is one"
        return None, [Diagnostic("PT010", message, span=_span(source, nodes[1]), help="remove the line ---")]
    if not nodes:
        return None, [Diagnostic("PT005", "the spec is empty", span=Span(source.file, 1, 1, 1, 1), help=_EMPTY_HELP)]
    reader = _Reader(source)
    value = reader.value(nodes[0], (), 0)
    return value, reader.findings


_EMPTY_HELP = "partool init writes one to start from"


def _documents(text: str) -> Iterator[yaml.Node]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            yield loader.get_node()
    finally:
        loader.dispose()


def _too_deep(source: Source) -> Diagnostic | None:
    # Composing nodes recurses over nested values; reading events does not.
    depth = 0
    for event in yaml.parse(source.text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                span = _mark_span(source, event.start_mark)
                return Diagnostic("PT009", f"values are nested more than {MAX_DEPTH} deep", span=span)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return None


class _Reader:
    """Converts YAML nodes to Python values; collects their positions and the findings."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.findings: list[Diagnostic] = []
        self._nodes = 0
        self._open: set[int] = set()

    def value(self, node: yaml.Node, path: SpecPath, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or id(node) in self._open or depth > MAX_DEPTH:
            return self._bomb(node)
        self.source.values[path] = _span(self.source, node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._check_tag(node, _SEQ if isinstance(node, yaml.SequenceNode) else _MAP, path)
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(child, (*path, index), depth + 1) for index, child in enumerate(node.value)]
            return self._mapping(node, path, depth)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.Node, path: SpecPath, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            span = _span(self.source, key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.findings.append(
                    Diagnostic("PT011", "a key is a name, not a list or a mapping", path=path, span=span)
                )
                continue
            key = key_node.value
            if key in result:
                first = Label(self.source.keys[(*path, key)], "first given here")
                message = f"`{key}` is given twice"
                self.findings.append(
                    Diagnostic("PT008", message, span=span, help="keep one of the two", related=(first,), path=path)
                )
                continue
            self.source.keys[(*path, key)] = span
            result[key] = self.value(value_node, (*path, key), depth + 1)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: SpecPath) -> Any:
        self._check_tag(node, _STR, path)
        plain = node.style is None or node.style == ""
        if not plain or node.tag != _STR:
            return node.value
        value = resolve(node.value)
        if isinstance(value, int | float) and abs(value) > (_LARGEST_INT if isinstance(value, int) else _LARGEST):
            shown = MASK if is_secret(path) else f"{node.value:.40}"
            message = f"{shown} is outside of what any field can hold"
            self.findings.append(
                Diagnostic(
                    "PT104",
                    message,
                    path=path,
                    span=_span(self.source, node),
                    help="a finite number nearer to zero",
                )
            )
            return 1
        return value

    def _check_tag(self, node: yaml.Node, expected: str, path: SpecPath) -> None:
        if node.tag not in (expected, "!", None):
            tag = MASK if is_secret(path) else repr(node.tag.replace("tag:yaml.org,2002:", "!!"))
            message = f"the tag {tag} is not used in a spec"
            span = _span(self.source, node)
            self.findings.append(Diagnostic("PT006", message, path=path, span=span, help="write the plain value"))

    def _bomb(self, node: yaml.Node) -> None:
        if not any(finding.code == "PT009" for finding in self.findings):
            cyclic = id(node) in self._open
            message = "an alias refers to itself" if cyclic else f"aliases expand to more than {MAX_NODES:,} values"
            span = _span(self.source, node)
            self.findings.append(Diagnostic("PT009", message, span=span, help="write the values out"))


def _span(source: Source, node: yaml.Node) -> Span:
    start, end = node.start_mark, node.end_mark
    if isinstance(node, yaml.CollectionNode) and end.line > start.line:
        return Span(source.file, start.line + 1, start.column + 1, start.line + 1, start.column + 2)
    return Span(source.file, start.line + 1, start.column + 1, end.line + 1, max(end.column + 1, start.column + 2))


def _mark_span(source: Source, mark: Any) -> Span:
    return Span(source.file, mark.line + 1, mark.column + 1, mark.line + 1, mark.column + 2)


def _finding_at(source: Source, position: int, code: str, message: str, help: str = "") -> Diagnostic:
    line = source.text.count("\n", 0, position) + 1
    column = position - (source.text.rfind("\n", 0, position) + 1) + 1
    return Diagnostic(code, message, span=Span(source.file, line, column, line, column + 1), help=help)


def _syntax_error(source: Source, error: yaml.YAMLError) -> Diagnostic:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        problem = getattr(error, "problem", None) or "not valid YAML"
        if "nesting depth" in problem:  # PyYAML has a limit of its own from 6.0.4 on
            return Diagnostic("PT009", f"values are nested more than {MAX_DEPTH} deep", span=_mark_span(source, mark))
        if "undefined alias" in problem:  # the message would repeat a password that begins with *
            problem = "found undefined alias"
        context = getattr(error, "context", None)
        message = f"not valid YAML: {problem}" + (f" ({context})" if context else "")
        if help := _tab_help(source, mark.line):
            return Diagnostic("PT006", message, span=_mark_span(source, mark), help=help)
        return Diagnostic("PT006", message, span=_mark_span(source, mark), help=_syntax_help(f"{problem} {context}"))
    position = getattr(error, "position", 0) or 0
    return _finding_at(source, position, "PT006", f"not valid YAML: {getattr(error, 'reason', 'it cannot be read')}")


def _tab_help(source: Source, at: int) -> str:
    """Return help if the indentation of line ``at`` (from 0) has a tab, which YAML forbids; else an empty text."""
    indented = [line[: len(line) - len(line.lstrip())] for line in source.lines]
    tabbed = [number for number, indent in enumerate(indented, 1) if "\t" in indent]
    if at + 1 not in tabbed:
        return ""
    lines = f"line {at + 1} is" if len(tabbed) == 1 else f"{len(tabbed)} lines, the first of them {tabbed[0]}, are"
    command = f"sed -i 's/\\t/  /g' {shlex.quote(source.file)}"
    return f"{lines} indented with tabs, which YAML does not allow: write two spaces for each tab ({command})"


def _syntax_help(problem: str) -> str:
    if "\\t" in problem or "tab" in problem:
        return "indent with spaces"
    if "mapping values are not allowed" in problem:
        return "quote a value that holds `: `, or check the indentation"
    if "scanning an alias" in problem:
        return "quote a value that begins with `*`, such as a glob: '*.jsonl'"
    if "expected <block end>" in problem or "did not find expected" in problem:
        return "check the indentation and the brackets above this line"
    return ""
