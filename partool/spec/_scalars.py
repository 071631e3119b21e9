"""Plain scalars under the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema)."""

from __future__ import annotations

import re

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
