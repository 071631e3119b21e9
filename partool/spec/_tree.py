"""YAML text to plain values with positions: the 1.2 core schema, bounded in size and depth."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from partool.diagnostics.record import Diagnostic, Span

MAX_NODES = 20_000
"""Values after every alias is replaced by what it stands for."""
MAX_DEPTH = 40
_MAX_INT = 2**63 - 1
_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

Path = tuple[str | int, ...]


@dataclass(slots=True)
class Node:
    """A YAML value; ``value`` is a scalar, a list of nodes, or a list of (key node, value node)."""

    kind: str
    value: Any
    span: Span
    size: int = 1
    open: bool = True
    tag: str | None = None


@dataclass(slots=True)
class Tree:
    """Plain values, where each stands, and what was wrong on the way."""

    data: Any = None
    keys: dict[Path, Span] = field(default_factory=dict)
    values: dict[Path, Span] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)

    def error(self, code: str, message: str, span: Span, path: Path = (), **more: Any) -> None:
        """Add a finding."""
        self.diagnostics.append(Diagnostic(code, message, path=path, span=span, **more))


class _RefusedError(Exception):
    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic


def read_tree(text: str, file: str) -> Tree:
    """Return the values of a YAML text; where it is malformed, ``data`` is None and the findings say why."""
    tree = Tree()
    try:
        root = _compose(text, file, tree)
    except _RefusedError as error:
        tree.diagnostics.append(error.diagnostic)
        return tree
    except yaml.YAMLError as error:
        tree.diagnostics.append(_syntax_error(error, file, text))
        return tree
    if root is None:
        tree.error("PT008", "the file is empty", Span(file, 1, 1, 1, 2), help="partool init writes a first spec")
        return tree
    tree.data = _convert(root, (), tree)
    return tree


def _compose(text: str, file: str, tree: Tree) -> Node | None:
    """Return the root of the first document; a second one is a finding.

    The parser's events are put together here rather than by PyYAML's composer, which recurses without a bound.
    """
    stack: list[Node] = []
    anchors: dict[str, Node] = {}
    root: Node | None = None
    documents = 0
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for event in yaml.parse(text, Loader=loader):
        span = _span(event, file)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents == 2:
                tree.error(
                    "PT007", "a second document begins here", span, help="a spec is one document; split the file"
                )
                return root
        elif isinstance(event, yaml.CollectionEndEvent):
            _close(stack, span)
        elif isinstance(event, yaml.NodeEvent):
            node = _node(event, span, anchors)
            if len(stack) >= MAX_DEPTH and node.open:
                _refuse("PT011", f"values are nested more than {MAX_DEPTH} deep", span)
            _add(stack, node)
            if not stack:
                root = node
            if node.open:
                stack.append(node)
    return root


def _node(event: Any, span: Span, anchors: dict[str, Node]) -> Node:
    if isinstance(event, yaml.AliasEvent):
        target = anchors.get(event.anchor)
        if target is None:
            _refuse("PT011", f"alias *{event.anchor} has no anchor before it", span)
        if target.open:
            _refuse("PT011", f"alias *{event.anchor} stands inside what it refers to", span)
        return Node(target.kind, target.value, span, target.size, open=False, tag=target.tag)
    kinds = {yaml.ScalarEvent: "scalar", yaml.SequenceStartEvent: "list", yaml.MappingStartEvent: "mapping"}
    kind = kinds[type(event)]
    node = Node(kind, [], span, open=kind != "scalar", tag=event.tag)
    if kind == "scalar":
        node.value = event.value
        if event.tag is None:
            node.tag = "plain" if event.implicit[0] else "!"
    if event.anchor is not None:
        anchors[event.anchor] = node
    return node


def _add(stack: list[Node], node: Node) -> None:
    if not stack:
        return
    parent = stack[-1]
    parent.value.append(node)
    if not node.open:
        _grow(parent, node)


def _close(stack: list[Node], end: Span) -> None:
    node = stack.pop()
    node.open = False
    start = node.span
    if (
        end.end_line == start.line or end.end_column > end.column
    ):  # a flow collection; a block one has no end of its own
        node.span = Span(start.file, start.line, start.column, end.end_line, end.end_column)
    if node.kind == "mapping":
        node.value = list(zip(node.value[::2], node.value[1::2], strict=True))
    if stack:
        _grow(stack[-1], node)


def _grow(parent: Node, node: Node) -> None:
    parent.size += node.size
    if parent.size > MAX_NODES:
        _refuse("PT011", f"the file stands for more than {MAX_NODES} values once its aliases are expanded", node.span)


def _convert(node: Node, path: Path, tree: Tree) -> Any:
    tree.values[path] = node.span
    if node.kind == "scalar":
        return _scalar(node, path, tree)
    wanted = {"list": (None, "!", _TAG + "seq"), "mapping": (None, "!", _TAG + "map")}[node.kind]
    if node.tag not in wanted:
        tree.error("PT005", f"tag {_shown_tag(node.tag)} does not fit a {node.kind}", node.span, path, help="remove it")
    if node.kind == "list":
        return [_convert(item, (*path, i), tree) for i, item in enumerate(node.value)]
    return _mapping(node, path, tree)


def _mapping(node: Node, path: Path, tree: Tree) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _convert(key_node, (*path, "?"), Tree()) if key_node.kind == "scalar" else None
        if not isinstance(key, str):
            shown = key_node.value if key_node.kind == "scalar" else f"a {key_node.kind}"
            tree.error("PT010", f"a key must be text, this is {shown!r:.40}", key_node.span, path, help="quote it")
            continue
        here = (*path, key)
        if key in result:
            first = tree.keys[here]
            message = f"{key!r} is given twice, first in line {first.line}"
            tree.error("PT004", message, key_node.span, here, help="keep one of the two")
            continue
        tree.keys[here] = key_node.span
        result[key] = _convert(value_node, here, tree)
    return result


def _scalar(node: Node, path: Path, tree: Tree) -> Any:
    text, tag = str(node.value), node.tag
    if tag in ("!", _TAG + "str"):
        return text
    value = resolve(text)
    if tag == "plain":
        return _bounded(value, text, node.span, path, tree)
    expected = {"int": int, "float": (int, float), "bool": bool, "null": type(None)}.get((tag or "").removeprefix(_TAG))
    if expected is None or not isinstance(value, expected):
        message = f"tag {_shown_tag(tag)} does not fit {text!r:.40}"
        tree.error("PT005", message, node.span, path, help="remove it; plain YAML values need no tags")
        return text
    return float(value) if tag == _TAG + "float" else _bounded(value, text, node.span, path, tree)


def resolve(text: str) -> Any:
    """Return the value of a plain scalar by YAML 1.2's core schema: ``on`` is text, ``0777`` is 777, ``1e-4`` a float."""
    if _NULL.fullmatch(text):
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) < 40 else _MAX_INT + 1
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def _bounded(value: Any, text: str, span: Span, path: Path, tree: Tree) -> Any:
    """Return a value; a number that is not finite or needs more than 64 bits is a finding."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not -_MAX_INT <= value <= _MAX_INT and not (isinstance(value, float) and abs(value) < 1e300):
        tree.error("PT104", f"{text:.40} is not a number that can be used", span, path, help="give a finite number")
        return 1
    return value


def _syntax_error(error: yaml.YAMLError, file: str, text: str) -> Diagnostic:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
    if mark is None:
        before = text[: getattr(error, "position", 0)]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    else:
        line, column = mark.line + 1, mark.column + 1
    context = getattr(error, "context", None)
    message = f"this is not YAML: {problem}" + (f", {context}" if context else "")
    helping = "indent with spaces, not tabs" if "\\t" in problem or "'\t'" in problem else ""
    return Diagnostic("PT003", message, span=Span(file, line, column, line, column + 1), help=helping)


def _refuse(code: str, message: str, span: Span) -> NoReturn:
    raise _RefusedError(Diagnostic(code, message, span=span, help="write the values out, without aliases"))


def _span(event: Any, file: str) -> Span:
    start, end = event.start_mark, event.end_mark
    return Span(file, start.line + 1, start.column + 1, end.line + 1, end.column + 1)


def _shown_tag(tag: str | None) -> str:
    return (tag or "!").replace(_TAG, "!!")
