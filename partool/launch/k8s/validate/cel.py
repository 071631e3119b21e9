"""Evaluates the CEL rules of CRDs (``x-kubernetes-validations``) for an object that is about to be created.

Semantics: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#validation-rules.
Rules with ``oldSelf`` apply to updates only. An error in a rule, such as a missing field, refuses the object.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict

from partool.launch.k8s.validate.crd_schemas import CrdSource, custom, why_not
from partool.launch.k8s.validate.findings import FieldFault
from partool.launch.k8s.validate.manifest import Manifest, Path
from partool.launch.k8s.validate.structural import Schema, child, with_defaults
from partool.launch.target import Level


def functions() -> dict[str, Callable[..., Any]]:
    """Return the CEL functions that Kubernetes adds, by name; a method gets its object as the first argument."""
    types: Any = importlib.import_module("celpy.celtypes")
    text, number, true = types.StringType, types.IntType, types.BoolType

    def texts(items: list[str]) -> Any:
        return types.ListType([text(item) for item in items])

    def index(value: Any, item: Any) -> Any:
        if isinstance(value, str):
            return number(value.find(item))
        return number(list(value).index(item) if item in value else -1)

    def last_index(value: Any, item: Any) -> Any:
        if isinstance(value, str):
            return number(value.rfind(item))
        return number(max((at for at, each in enumerate(value) if each == item), default=-1))

    def find(value: Any, pattern: str) -> Any:
        match = re.search(pattern, value)
        return text(match.group() if match else "")

    return {
        "lowerAscii": lambda value: text(value.lower()),
        "upperAscii": lambda value: text(value.upper()),
        "trim": lambda value: text(value.strip()),
        "split": lambda value, by, *most: texts(value.split(by, *(int(each) - 1 for each in most))),
        "join": lambda items, by="": text(str(by).join(items)),
        "replace": lambda value, old, new: text(value.replace(old, new)),
        "substring": lambda value, start, end=None: text(value[int(start) : None if end is None else int(end)]),
        "find": find,
        "indexOf": index,
        "lastIndexOf": last_index,
        "isSorted": lambda items: true(all(first <= second for first, second in itertools.pairwise(items))),
        "sum": lambda items: sum(items[1:], items[0]) if items else number(0),
        "min": min,
        "max": max,
    }


NAME = "CEL rules"
_RULES = "x-kubernetes-validations"
_OLD = re.compile(r"\b(oldSelf|optionalOldSelf)\b")
_RESERVED = {
    "true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function", "if", "import", "let",
    "loop", "package", "namespace", "return", "var", "void", "while",
}  # fmt: skip
_ESCAPES = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))
_MISSING = "no such member"
"""Beginning of cel-python's message for a missing field; a missing field is an error for Kubernetes too."""


class NotEvaluated(Exception):  # noqa: N818  # a finding about a rule, not an error of the program
    """A rule that cel-python cannot compile or evaluate; the message says why."""


@dataclass
class Tally:
    """Record of which rules of a manifest's objects were evaluated and which were not."""

    evaluated: set[int] = field(default_factory=set)
    """Identities of the rules that were evaluated at least once."""
    all: int = 0
    for_changes: int = 0
    not_evaluated: dict[int, str] = field(default_factory=dict)
    """Identity of each rule that was not evaluated → the rule's text and the reason."""

    def words(self) -> str:
        """Return the numbers of rules by result as text; rules that could not be evaluated are quoted."""
        absent = self.all - len(self.evaluated | self.not_evaluated.keys())
        text = f"{len(self.evaluated)} rules evaluated, {absent} of fields that are not set, "
        text += f"{self.for_changes} for changes only"
        if self.not_evaluated:
            listed = "; ".join(dict.fromkeys(self.not_evaluated.values()))
            text += f", {len(self.not_evaluated)} COULD NOT BE EVALUATED: {listed}"
        return text


def level(manifest: Manifest, crd_source: CrdSource) -> Level:
    """Return the level with the findings of the CEL rules in the definitions (CRDs) of a manifest's objects."""
    problem = why_not(manifest, crd_source, "celpy")
    if problem is not None:
        return Level(NAME, False, problem)
    tally, faults = Tally(), []
    for document in custom(manifest):
        definition = crd_source.of(document)
        if definition is not None:
            value = with_defaults(definition.schema, document.value)
            faults += list(_walk(definition.schema, value, document.owner, (), tally))
            rules = [rule for _, rule in rules_of(definition.schema)]
            tally.for_changes += sum(map(of_a_change, rules))
            tally.all += sum(not of_a_change(rule) for rule in rules)
    return Level(NAME, True, f"{crd_source.words}: {tally.words()}", tuple(each.diagnostic("PT572") for each in faults))


class CelRule(TypedDict, total=False):
    """A CEL rule of a definition, as ``x-kubernetes-validations`` has it."""

    rule: Required[str]
    message: str


def rules_of(schema: Schema) -> Iterator[tuple[str, CelRule]]:
    """Yield (place in the schema, rule) for every CEL rule of a schema."""
    yield from _rules_of(schema, "")


def _rules_of(schema: Schema, place: str) -> Iterator[tuple[str, CelRule]]:
    for rule in schema.get(_RULES) or ():
        yield place, rule
    for name, sub in schema.get("properties", {}).items():
        yield from _rules_of(sub, f"{place}.{name}" if place else name)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _rules_of(schema[key], f"{place}.*")


def of_a_change(rule: CelRule) -> bool:
    """Return True for a rule that compares an object with its earlier state."""
    return _OLD.search(rule["rule"]) is not None


@functools.lru_cache(maxsize=512)
def program(rule: str) -> Any:
    """Return ``rule`` as a program that cel-python has compiled; raises NotEvaluated."""
    celpy: Any = importlib.import_module("celpy")
    try:
        environment = _environment()
        return environment.program(environment.compile(rule), functions=functions())
    except celpy.CELParseError as error:
        raise NotEvaluated(f"cannot be compiled: {str(error).splitlines()[0]}") from error


@functools.cache
def _environment() -> Any:
    return importlib.import_module("celpy").Environment()


def holds(rule: str, schema: Schema, value: Any) -> str | None:
    """Return the reason why a rule does not hold for a value; None if the rule holds. Raises NotEvaluated."""
    celpy: Any = importlib.import_module("celpy")
    compiled = program(rule)
    try:
        return None if compiled.evaluate({"self": _cel(value, schema)}) else "does not hold"
    except celpy.CELEvalError as error:
        text = str(error.args[0]) if error.args else "error"
        if text.startswith(_MISSING):
            return text
        raise NotEvaluated(text.split(" (in activation")[0]) from error
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise NotEvaluated(f"{type(error).__name__}: {error}") from error


def _walk(schema: Schema, value: Any, owner: str, path: Path, tally: Tally) -> Iterator[FieldFault]:
    for rule in (schema.get(_RULES) or ()) if value is not None else ():
        if not of_a_change(rule) and (text := _evaluate(rule, schema, value, tally)):
            yield FieldFault(owner, path, text)
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(child(schema, name), item, owner, (*path, name), tally)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(child(schema, 0), item, owner, (*path, index), tally)


def _evaluate(rule: CelRule, schema: Schema, value: Any, tally: Tally) -> str | None:
    """Return the reason why a rule refuses a value; None if the rule holds or could not be evaluated."""
    text = rule["rule"]
    try:
        why = holds(text, schema, value)
    except NotEvaluated as error:
        tally.not_evaluated[id(rule)] = f"{text} ({error})"
        return None
    tally.evaluated.add(id(rule))
    return None if why is None else rule.get("message") or f"{text} {why}"


def _cel(value: Any, schema: Schema) -> Any:
    """Return a value as the CEL type that its schema implies; CEL rules can also use the escaped names of fields."""
    types: Any = importlib.import_module("celpy.celtypes")
    if isinstance(value, dict):
        fields = {types.StringType(name): _cel(item, child(schema, name)) for name, item in value.items()}
        declared = {name for name in value if name in schema.get("properties", {})}
        fields |= {types.StringType(_escaped(n)): fields[types.StringType(n)] for n in declared if _escaped(n) != n}
        return types.MapType(fields)
    if isinstance(value, list):
        return types.ListType([_cel(item, child(schema, 0)) for item in value])
    if schema.get("type") == "number" and isinstance(value, int) and not isinstance(value, bool):
        return types.DoubleType(value)
    if isinstance(value, str) and schema.get("format") in ("date-time", "duration"):
        kind = types.TimestampType if schema["format"] == "date-time" else types.DurationType
        return kind(value)
    return importlib.import_module("celpy").json_to_cel(value)


def _escaped(name: str) -> str:
    if name in _RESERVED:
        return f"__{name}__"
    for plain, escape in _ESCAPES:
        name = name.replace(plain, escape)
    return name
