"""Turns pydantic's validation errors into findings with the words of specs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from math import ceil, floor, isfinite, isnan
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from partool.diagnostics.record import Diagnostic
from partool.diagnostics.secrets import MASK, masked
from partool.spec._aliases import ALIASES, BESIDE, IN_SECTION, NOTES
from partool.spec._base import ONE_KEY
from partool.spec._source import SpecPath, is_secret
from partool.spec._value_help import (
    NONE_WORDS,
    batch_words,
    limit_words,
    near_word,
    number_words,
    section_words,
    truth,
    written,
)
from partool.spec.patterns import PATTERNS
from partool.spec.spec import Spec
from partool.spec.training import TrainingSpec

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section with keys",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "literal_error": "one of the choices",
    "finite_number": "a finite number",
}
_DEGREES = {
    ("parallel", *names)
    for names in (
        ("tensor",), ("tensor", "degree"),
        ("pipeline",), ("pipeline", "stages"), ("sequence",), ("sequence", "degree"), ("expert",),
        ("expert_tensor",),
        ("data", "shard"),
    )
}  # fmt: skip
"""Fields that count ranks; the value 1 switches the field's kind of parallelism off."""
_BATCH = ("training", "global_batch")
_DEFAULT_LENGTH = TrainingSpec.model_fields["sequence_length"].default
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "too_short": ("min_length", "at least this long:"),
    "too_long": ("max_length", "at most this long:"),
    "string_too_long": ("max_length", "at most this long:"),
}


def findings(error: ValidationError, document: Any) -> list[Diagnostic]:
    """Return one finding per wrong value in the document; pydantic's errors for the members of a union become one."""
    by_path: dict[SpecPath, list[dict[str, Any]]] = {}
    for details in error.errors(include_url=False):
        item: dict[str, Any] = {**details}
        path = _real_path(item["loc"], document, item["type"])
        item |= {"input": _showable(path, item["input"])}
        if path == _BATCH:
            training = document["training"]
            item |= {"sequence_length": training.get("sequence_length", _DEFAULT_LENGTH)}
        by_path.setdefault(path, []).append(item)
    return [_finding(path, items) for path, items in by_path.items() if not _covered(path, by_path)]


def _showable(path: SpecPath, value: Any) -> Any:
    """Return a value for messages; secrets in it are hidden."""
    if isinstance(value, dict | list) or (isinstance(value, str) and value == path[-1]):
        return value
    if is_secret(path):
        return MASK
    return masked(value) if isinstance(value, str) else value


def _covered(path: SpecPath, by_path: dict[SpecPath, Any]) -> bool:
    # A union of a scalar and a section gives errors for the whole section and for its keys; errors for keys say more.
    return any(len(other) > len(path) and other[: len(path)] == path for other in by_path)


def _real_path(loc: tuple[str | int, ...], document: Any, kind: str) -> SpecPath:
    """Return the path in the document for pydantic's location, which also names union members and validators."""
    path: list[str | int] = []
    value = document
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(value, dict) and isinstance(part, str) and (part in value or (last and kind == "missing")):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _finding(path: SpecPath, items: list[dict[str, Any]]) -> Diagnostic:
    item = items[0]
    name = dotted(path)
    if item["type"] == "extra_forbidden":
        return _unknown(path, item["input"])
    if item["type"] == "missing":
        return Diagnostic("PT103", f"`{name}` is missing", path=path, help=_missing_help(path))
    for each in items:  # in a union of a text and a list of texts, report the text's error
        if each["type"] == "string_pattern_mismatch" and len(items) > 1:
            return _pattern(path, each)
    if len(items) > 1 or item["type"] == "literal_error":
        return _choice(path, items)
    given = shown(item["input"])
    if item["type"] in _BOUNDS:
        key, words = _BOUNDS[item["type"]]
        bound = item["ctx"][key]
        size = "" if key in ("min_length", "max_length") else f", not {given}"
        if isinstance(item["input"], float) and isnan(item["input"]):  # fails every comparison
            return Diagnostic("PT104", f"`{name}` must be a number, not {given}", path=path, help="use a finite number")
        return Diagnostic(
            "PT104", f"`{name}` must be {words} {_amount(bound)}{size}", path=path, help=_number_help(path, item)
        )
    if item["type"] == "string_pattern_mismatch":
        return _pattern(path, item)
    expected = _TYPES.get(item["type"], item["msg"][:1].lower() + item["msg"][1:])
    help = _number_help(path, item) or _type_help(path, item)
    return Diagnostic("PT102", f"`{name}` must be {expected}, not {given}", path=path, help=help)


def _amount(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _pattern(path: SpecPath, item: dict[str, Any]) -> Diagnostic:
    """Return the finding about a value or key whose text does not match the required pattern."""
    given, name = shown(item["input"]), dotted(path)
    help = PATTERNS.get(item["ctx"]["pattern"], "")
    if item["loc"][-1] != "[key]":
        return Diagnostic("PT106", f"`{name}` cannot be {given}", path=path, help=help)
    if path[:2] in (("launch", "env"), ("launch", "secrets")):
        message = f"{given} cannot be the name of an environment variable"
        return Diagnostic("PT221", message, path=path, help="letters, digits and underscores")
    return Diagnostic("PT106", f"{given} cannot be a key of `{dotted(path[:-1])}`", path=path, help=help)


def _choice(path: SpecPath, items: list[dict[str, Any]]) -> Diagnostic:
    """Return one finding about a value that no member of a union accepts; it lists the allowed words and types."""
    words: list[str] = []
    types: list[str] = []
    for item in items:
        if item["type"] == "literal_error":
            words += [part.strip() for part in item["ctx"]["expected"].replace(" or ", ", ").split(",")]
        elif item["type"] in _BOUNDS:
            key, word = _BOUNDS[item["type"]]
            types.append(f"a number {word} {_amount(item['ctx'][key])}")
        else:
            types.append(_TYPES.get(item["type"], item["msg"].lower()))
    allowed = list(dict.fromkeys([*types, *words]))
    value = items[0]["input"]
    if section_at(path) is not None and "a section with keys" not in allowed:
        allowed.insert(len(dict.fromkeys(types)), "a section with keys")
    plain = [word.strip("'") for word in words]
    near = difflib.get_close_matches(str(value), plain, n=1) or [word for word in [near_word(value, plain)] if word]
    code = "PT105" if words else "PT102"
    expected = " or ".join([", ".join(allowed[:-1]), allowed[-1]] if len(allowed) > 1 else allowed).replace("'", "")
    listed = next((_type_help(path, item) for item in items if item["type"] == "list_type"), "")
    if value is True and {"none", "full"} <= set(plain):  # recompute, which is a switch elsewhere
        near = ["full"]
    if "true or false" in allowed and truth(value):  # YAML 1.1 read them so
        near = [truth(value)]
    if isinstance(value, dict) and path in ONE_KEY:
        key = ONE_KEY[path]
        return Diagnostic(
            code,
            f"`{dotted(path)}` has one key, `{key}`",
            path=path,
            help=f"write {path[-1]}: {{{key}: 4}}, or {path[-1]}: 4",
        )
    help = f"did you mean `{near[0]}`?" if near else _number_help(path, items[0]) or listed
    return Diagnostic(code, f"`{dotted(path)}` must be {expected}, not {shown(value)}", path=path, help=help)


def _number_help(path: SpecPath, item: dict[str, Any]) -> str:
    """Return help for a number that is too small, is not whole, or is a word such as none; else an empty text."""
    value, least, bounds = item["input"], _least(path), item.get("ctx", {})
    if least is None and isinstance(bounds.get("gt", bounds.get("ge")), int):
        least = bounds["gt"] + 1 if "gt" in bounds else bounds["ge"]
    if path in _DEGREES and str(value).lower() in NONE_WORDS:
        return "use 1 for none"
    key = str(path[-1]) if path else ""
    if path == _BATCH and (words := batch_words(value, item.get("sequence_length"))):
        return words
    if words := number_words(key, item["type"], value) or limit_words(key, value, bounds.get("lt", bounds.get("le"))):
        return words
    if least is None or isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return ""
    if value < least:
        return f"use {least} or more"
    return f"use {floor(value)} or {ceil(value)}" if value != int(value) else ""


def _least(path: SpecPath) -> int | None:
    """Return the smallest whole number that a field or its items allow; None if they take no whole number."""
    names = [part for part in path if isinstance(part, str)]
    section = section_at(path)
    if section is not None and path in _DEGREES:
        names.append("stages" if "stages" in section.model_fields else "degree")
    model = section_at(tuple(names[:-1]))
    field = model.model_fields.get(names[-1]) if model is not None and names else None
    if field is None:
        return None
    return next(
        _bounds_below(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation), None
    )


def _bounds_below(annotation: Any) -> Iterator[int]:
    if get_origin(annotation) is Annotated:
        kind, *notes = get_args(annotation)
        notes = [bound for note in notes for bound in getattr(note, "metadata", [note])]  # within a Field
        if kind is int:
            yield from (note.gt + 1 for note in notes if getattr(note, "gt", None) is not None)
            yield from (note.ge for note in notes if getattr(note, "ge", None) is not None)
    for argument in get_args(annotation):
        yield from _bounds_below(argument)


def _unknown(path: SpecPath, value: Any) -> Diagnostic:
    key = str(path[-1])
    siblings = known_keys(path[:-1])
    beside = _beside(path[:-1], key, siblings)
    where = f"in `{dotted(path[:-1])}`" if len(path) > 1 else "at the top level of a spec"
    help = written(beside, value) if beside else suggest(key, siblings)
    return Diagnostic("PT101", f"there is no `{key}` {where}", path=path, label="unknown key", help=help)


def _beside(section: SpecPath, key: str, siblings: list[str]) -> str:
    """Return the key of a section that another tool's key stands for; empty if there is none."""
    near = IN_SECTION.get(dotted(section), {}).get(key, BESIDE.get(key, ""))
    return near if near in siblings else ""


def suggest(key: str, siblings: list[str]) -> str:
    """Return help for an unknown key: a similar name, the same name in another section, or all known names."""
    if key in NOTES:
        return NOTES[key]
    if beside := _beside((), key, siblings):
        return f"did you mean `{beside}`?"
    elsewhere = [dotted(path) for path in all_paths() if path[-1] == key]
    # The same name in another section is a better guess than a similar name here.
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.85 if elsewhere else 0.7)
    if near and ALIASES.get(key, near[0]).endswith(near[0]):
        return f"did you mean `{near[0]}`?"
    if key in ALIASES:
        return f"here that is `{ALIASES[key]}`"
    if elsewhere:
        return (
            f"`{key}` belongs under `{elsewhere[0].rpartition('.')[0]}`"
            if "." in elsewhere[0]
            else "it is a top-level key"
        )
    if near := difflib.get_close_matches(key, siblings, n=1, cutoff=0.5):
        return f"did you mean `{near[0]}`?"
    return f"keys here: {', '.join(siblings)}" if siblings else ""


def meant_by(path: SpecPath) -> set[SpecPath]:
    """Return the paths that the user may have meant by an unknown key: its section, and places of equal or near names.

    Of the top level, which every section is in, only sections with a near name count.
    """
    key, section = str(path[-1]), path[:-1]
    alias = tuple(ALIASES.get(key, key).split("."))
    elsewhere = {each for each in all_paths() if each[-1] in (key, alias[-1])}
    near = (
        {(name,) for name in difflib.get_close_matches(key, known_keys(()), cutoff=0.5)} if not section else {section}
    )
    return elsewhere | near


def _missing_help(path: SpecPath) -> str:
    examples = {("model",): "model: llama3-8b", ("data",): "data: {source: /data/tokens/*.bin}"}
    return f"for example `{examples[path]}`" if path in examples else ""


def _type_help(path: SpecPath, item: dict[str, Any]) -> str:
    if item["type"] in ("dict_type", "model_type", "model_attributes_type"):
        return section_words(".".join(map(str, path)), item["input"], known_keys(path))
    if item["input"] is False and path[:1] == ("launch",) and path[-2:-1] == ("options",):
        return "leave the option out"
    if item["type"] == "bool_type" and truth(item["input"]):
        return f"did you mean `{truth(item['input'])}`?"
    if item["type"] == "string_type" and isinstance(item["input"], int | float | bool):
        return f'in quotes it is text: "{shown(item["input"])}"'
    if item["type"] == "list_type" and isinstance(item["input"], str) and item["input"] not in ("", "all"):
        return (
            "use [] for none" if item["input"].lower() in NONE_WORDS else f"in brackets it is a list: [{item['input']}]"
        )
    return ""


def shown(value: Any) -> str:
    """Return a short text that stands for a value in messages; secrets are hidden."""
    if isinstance(value, dict):
        return "a section with keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = repr(masked(value) if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def dotted(path: SpecPath) -> str:
    """Return a path as text such as ``data.source[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def section_at(path: SpecPath) -> type[BaseModel] | None:
    """Return the pydantic class of the section at a path; None for a value, or if users choose the section's keys."""
    model, is_open = _section_at(path)
    return None if is_open else model


def is_open(path: SpecPath) -> bool:
    """Return True if users choose the keys of the section at a path, as in ``launch.env``."""
    return _section_at(path)[1]


def _section_at(path: SpecPath) -> tuple[type[BaseModel] | None, bool]:
    """Return (pydantic class, whether users choose the keys) for the section at a path.

    If users choose the keys, the class is that of the entries; it is None for plain values.
    """
    model: type[BaseModel] | None = Spec
    is_open = False
    for part in path:
        if is_open or isinstance(part, int):  # an entry, which has the model of all entries
            is_open = False
            continue
        if model is None or part not in model.model_fields:
            return None, False
        annotation = model.model_fields[part].annotation
        is_open = _is_mapping(annotation)
        model = next(_models(annotation), None)
    return model, is_open


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict or any(get_origin(argument) is dict for argument in get_args(annotation))


def known_keys(path: SpecPath) -> list[str]:
    """Return the keys that the section at a path may have; empty for a value."""
    model = section_at(path)
    return list(model.model_fields) if model else []


def all_paths(prefix: SpecPath = (), model: type[BaseModel] = Spec) -> Iterator[SpecPath]:
    """Yield the path of every key that a spec may have; a section comes before its keys."""
    for key, field in model.model_fields.items():
        yield (*prefix, key)
        for inner in _models(field.annotation):
            yield from all_paths((*prefix, key), inner)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
