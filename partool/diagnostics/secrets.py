"""Recognises secrets by name or by value, and removes secrets from texts.

The rules are data, in :mod:`partool.diagnostics._secret_rules`. All output for people and programs goes through
:func:`masked`, excerpts of files through :func:`masked_lines`; in doubt, both functions hide a text.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from partool.diagnostics._secret_rules import (
    ABOUT,
    ANYWHERE,
    ENDINGS,
    FORMS,
    KEYS,
    OF_TEXT,
    PASSES,
    SENTENCES,
    WORDS,
    SecretForm,
)
from partool.diagnostics.record import Diagnostic, Label

MASK = "***"
_LONGEST_NAME = 1024
"""Number of characters examined at the end of a name; the last words show whether it is the name of a secret."""
_LEAST_LITERAL = 4
"""Minimum length of known secrets that are searched for in texts; shorter secrets would match within ordinary words."""
_LONGEST_HARMLESS = 300
_HINT = re.compile("|".join(word.removesuffix("S") for word in (*ENDINGS, *sorted(WORDS), "KEY")), re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_HARMLESS = re.compile(
    r"[0-9]{0,4}|NAME|KEY\}*|[0-9]*\.[0-9]+|true|false|yes|no|on|off|none|null|auto|\*+|<[^<>]*>|\$\w+|\$\{\w+\}|\$\(.*"
    r"|~?/(?=.*[._-]|.{0,31}$).*|\.{1,2}/.*|[\w./~-]+\.(?:json|ya?ml|pem|key|crt|txt|env|toml|cfg|conf)",
    re.IGNORECASE,
)
"""Values that are no secret even under a secret's name: switches, small numbers, references, paths."""
_ASSIGNMENT = re.compile(
    r"(?<![A-Za-z0-9_.])(?<![A-Za-z0-9]-)(?P<name>[A-Za-z_][A-Za-z0-9_.-]{0,300})(?:=(?!=)|[\"']?[ \t]{0,3}:[ \t]{1,3})"
    r"|(?<!\S)--?(?P<option>[A-Za-z][A-Za-z0-9_-]{0,99})[ \t]{1,3}(?=[^\s-])"
)
_ASSIGNED = re.compile(r"\"[^\"\n]*\"?|'[^'\n]*'?|[^\s&;,\"'`{\[][^\s&;,`]*")
_ENTRY = re.compile(r"(?<![A-Za-z0-9_./-])[\"']?(?P<name>[A-Za-z_][A-Za-z0-9_./-]{0,252})[\"']?[ \t]*(?::(?=\s|$)|=)")
_NAMED = re.compile(r"\b(?:name|key)[\"']?[ \t]*:[ \t]*[\"']?(?P<name>[A-Za-z_][A-Za-z0-9_./-]{0,252})")
_VALUE = re.compile(r"\bvalue[\"']?[ \t]*:")


def is_secret_name(name: str) -> bool:
    """Return True for the name of a secret: ``HF_TOKEN``, ``PGPASSWORD``, ``DB_PASS``, ``example.com/api-key``."""
    name = name[-_LONGEST_NAME:]
    if _HINT.search(name) is None:
        return False
    words = [word for word in re.split(r"[^A-Z0-9]+", _CAMEL.sub("_", name).upper()) if word]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in ("VALUE", "BASE64", "B64", "RAW")):
        words.pop()  # TOKEN_2, PASSWORD_B64
    if not words or any("DISABLE" in word for word in words):
        return False
    last, before = words[-1].rstrip("0123456789") or words[-1], words[-2] if len(words) > 1 else ""
    if last == "TOKEN" and before in OF_TEXT:
        return False
    if last in WORDS:
        return bool(before) and not (last == "PASS" and before in PASSES)
    if last.endswith(ENDINGS):
        return True
    if last.endswith("KEY"):
        return (last.removesuffix("KEY") or before) in KEYS
    return last not in ABOUT and any(word.endswith(ANYWHERE) for word in words)


def is_harmless(value: str) -> bool:
    """Return True for a value that is no secret even under a secret's name: a switch, a reference, a path."""
    return _HARMLESS.fullmatch(value.strip()[:4096]) is not None


def in_value(text: str) -> str | None:
    """Return a description of the first secret in a text; None if there is none."""
    if (secret := next(_by_form(text), None)) is not None:
        return secret[0].what
    return "a value behind the name of a secret" if next(_assigned(text), None) is not None else None


def in_variable(name: str, value: str) -> str | None:
    """Return the reason why a variable looks like a secret, by its name or value; None if it does not."""
    if is_secret_name(name) and not is_harmless(value):
        return "the name of a secret"
    return "a value that looks like a secret" if in_value(value) is not None else None


def masked(text: str, literals: Iterable[str] = ()) -> str:
    """Return a text with ``***`` in place of every secret in it.

    Values are hidden, not partool's own words: what stands behind a name in backticks, as partool writes names of
    fields and checks, is no value, and neither are words with which a sentence goes on.

    ``literals``: known secrets, which are hidden wherever they occur, also in the escaped form of Python or JSON.
    """
    for literal in sorted(set(literals), key=len, reverse=True):
        for form in {literal, repr(literal)[1:-1], *literal.splitlines()}:
            if len(form.strip()) >= _LEAST_LITERAL:
                text = text.replace(form, MASK)
    places = [*((start, end) for _, start, end in _by_form(text)), *_assigned(text)]
    return _without(text, places) if places else text


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # Compiled on first use: most commands need no pattern, and compiling all would take a tenth of a small plan's time.
    return re.compile(pattern)


def _by_form(text: str) -> Iterator[tuple[SecretForm, int, int]]:
    lowered = text.lower()
    for form in FORMS:
        if any(word in lowered for word in form.begins):
            pattern = _compiled(form.pattern)
            group = "secret" if "secret" in pattern.groupindex else 0
            yield from ((form, *match.span(group)) for match in pattern.finditer(text))


def _assigned(text: str) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each value that follows the name of a secret."""
    end = 0
    for match in _ASSIGNMENT.finditer(text):
        if match.start() < end or not is_secret_name(match["name"] or match["option"]):
            continue
        value_match = _ASSIGNED.match(text, match.end())
        value = value_match[0].strip("\"'") if value_match else ""
        if value_match and value and not is_harmless(value) and not _goes_on(value, text, match.end()):
            yield value_match.span()
            end = value_match.end()


def _goes_on(value: str, text: str, at: int) -> bool:
    """Return True if words of a message follow a name and its colon, instead of a value; ``value`` is the first.

    Such words begin a sentence, or are the system's text for an error: ``~/hf_token: Permission denied``.
    """
    return value.lower() in SENTENCES or text.startswith(_system_errors(), at)


@cache
def _system_errors() -> tuple[str, ...]:
    return tuple(os.strerror(number) for number in errno.errorcode)


def _without(text: str, places: Iterable[tuple[int, int]]) -> str:
    parts, position = [], 0
    for start, end in sorted(places):
        if start >= position:
            parts += [text[position:start], MASK]
        position = max(position, end)
    return "".join([*parts, text[position:]])


def without_secrets(finding: Diagnostic) -> Diagnostic:
    """Return a finding without secrets."""

    def clean(label: Label) -> Label:
        return Label(replace(label.span, file=masked(label.span.file)), masked(label.text))

    return replace(
        finding,
        message=masked(finding.message),
        label=masked(finding.label),
        help=masked(finding.help),
        path=tuple(masked(part) if isinstance(part, str) else part for part in finding.path),
        span=finding.span and replace(finding.span, file=masked(finding.span.file)),
        related=tuple(map(clean, finding.related)),
    )


def masked_lines(lines: Sequence[str]) -> list[str]:
    """Return the lines of a YAML file or a script without secrets; the lines need not be valid YAML.

    A line is hidden from the beginning of a secret to the line's end, so that earlier columns stay. Lines that
    continue the secret are hidden too: lines that are indented further, and lines up to the closing quote or bracket.
    """
    cuts = _cuts(lines)
    out: list[str] = []
    hidden = _Hidden()
    for number, line in enumerate(lines):
        cut = hidden.cut(line, lines[number - 1] if number else "")
        first = min((place for place in (cut, cuts.get(number)) if place is not None), default=None)
        out.append(line if first is None or not line[first:].strip() else line[:first] + MASK)
    return out


def _cuts(lines: Sequence[str]) -> dict[int, int]:
    """Return, for each line with a secret, line number → column where the line's first secret begins.

    A secret is recognised by its form or by the name before it.
    """
    text = "\n".join(lines)
    begins = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))
    columns: dict[int, int] = {}
    for start, end in (*((start, end) for _, start, end in _by_form(text)), *_assigned(text)):
        first = bisect.bisect_right(begins, start) - 1
        columns[first] = min(start - begins[first], columns.get(first, start))
        for number in range(first + 1, bisect.bisect_right(begins, max(start, end - 1))):
            columns[number] = 0
    return columns


class _Hidden:
    """State of the scan: whether a line still belongs to the last secret, or to ``launch.secrets``."""

    def __init__(self) -> None:
        self._indent: int | None = None
        self._section: int | None = None
        self._quote = ""
        self._depth = 0

    def cut(self, line: str, before: str) -> int | None:
        """Return the column where the secret part of a line begins; None if the line has no secret part."""
        indent = len(line) - len(line.lstrip())
        if self._holds(line, indent):
            return indent
        if line.strip() and self._section is not None and indent <= self._section:
            self._section = None
        start = self._start(line, before)
        if start is None:
            # A line of launch.secrets without a key continues the value above it.
            return indent if self._section is not None and not _ENTRY.search(line) else None
        rest = line[start:].strip()
        # Lines of a list entry are indented further than its dash.
        self._indent = indent + line.lstrip().startswith("- ")
        self._quote = rest[0] if rest[:1] in ("'", '"') and rest.count(rest[0]) % 2 else ""
        outside = max(0, _balance(line[:start]))
        self._depth = max(0, outside + _balance(rest)) if outside or rest[:1] in ("{", "[") else 0
        return start

    def _holds(self, line: str, indent: int) -> bool:
        if self._quote:
            if self._quote in line:
                self._depth += _balance(line.partition(self._quote)[2])
                self._quote = ""
            return True
        if self._depth > 0:
            self._depth += _balance(line)
            return True
        if self._indent is not None:
            text = line.strip()
            if not text or indent > self._indent or (indent == self._indent and text.startswith(("- ", "]", "}"))):
                return True
            self._indent = None
        return False

    def _start(self, line: str, before: str) -> int | None:
        """Return the column of the value after the first secret's name in a line; None if the line names no secret."""
        for entry in _ENTRY.finditer(line):
            opens = entry["name"] == "secrets" and self._section is None
            if opens:
                self._section = len(line) - len(line.lstrip())
            elif self._section is None and not is_secret_name(entry["name"]):
                continue
            rest = line[entry.end() :]
            value = rest.strip()
            if (opens and value[:1] in ("", "{")) or (not value and not is_secret_name(entry["name"])):
                continue
            if value and len(value) <= _LONGEST_HARMLESS and is_harmless(value.rstrip("}, ").strip("\"'")):
                continue
            return entry.end() + len(rest) - len(rest.lstrip())
        named = [match["name"] for text in (before, line) for match in _NAMED.finditer(text)]
        if any(map(is_secret_name, named)) and (value_at := _VALUE.search(line)):
            return value_at.end() + 1
        return None


def _balance(line: str) -> int:
    return sum(map(line.count, "{[")) - sum(map(line.count, "}]"))
