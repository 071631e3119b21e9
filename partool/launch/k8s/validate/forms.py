"""Forms of values that Kubernetes requires but its published schemas omit: names, labels, quantities, enums.

Sources: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/,
https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/. A form is a function that returns the
expected form in words, or None if the value has that form; values of another type are left to the schemas.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

Form = Callable[[Any], str | None]

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?")
_UNITS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10**3), "M": Decimal(10**6),
    "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip


def _texts(pattern: re.Pattern[str], longest: int, words: str) -> Form:
    def form(value: Any) -> str | None:
        if not isinstance(value, str) or (len(value) <= longest and pattern.fullmatch(value)):
            return None
        return f"{_shown(value)} must be {words}, at most {longest} characters"

    return form


label_name = _texts(_LABEL, 63, "lower-case letters, digits and hyphens, letters or digits at its ends")
label_name_1035 = _texts(_LABEL_1035, 63, "lower-case letters, digits and hyphens, beginning with a letter")
subdomain = _texts(_SUBDOMAIN, 253, "lower-case letters, digits, hyphens and dots, letters or digits at its ends")
port_name = _texts(re.compile(r"(?=.*[a-z])[a-z0-9](-?[a-z0-9])*"), 15, "lower-case letters, digits and single hyphens")
label_value = _texts(re.compile(rf"({_QUALIFIED.pattern})?"), 63, "letters, digits, -, _ and dots")
variable_name = _texts(re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*"), 1024, "letters, digits, -, _, dots, no digit first")
data_key = _texts(re.compile(r"(?!\.\.?$)(?!\.\.)[-._a-zA-Z0-9]+"), 253, "letters, digits, -, _ and dots")
rule_name = _texts(
    re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"), 128, "letters, digits, _, commas and colons, a letter first"
)
image = _texts(re.compile(r"[A-Za-z0-9]\S*"), 4096, "an image's name without blanks")
absolute = _texts(re.compile(r"/[^:\0]*"), 4096, "an absolute path without a colon")


def qualified(value: Any) -> str | None:
    """Require the form ``name`` or ``prefix/name``, which keys of labels, annotations, taints and resources have."""
    if not isinstance(value, str):
        return None
    prefix, slash, name = value.rpartition("/")
    if _QUALIFIED.fullmatch(name) and len(name) <= 63 and (not slash or subdomain(prefix) is None):
        return None
    return f"{_shown(value)} must be NAME or DOMAIN/NAME with letters, digits, -, _ and dots, the name at most 63"


def mode(value: Any) -> str | None:
    """Require the form of a file's permission bits, 0 to 0777."""
    return whole_number(0, 0o777)(value)


def whole_number(least: int, most: int = 2**31 - 1) -> Form:
    """Return the form of a whole number from ``least`` to ``most``."""

    def form(value: Any) -> str | None:
        if not isinstance(value, int) or isinstance(value, bool) or least <= value <= most:
            return None
        return f"{value} must be at least {least}" if value < least else f"{value} must be at most {most}"

    return form


def one_of(*allowed: str) -> Form:
    """Return the form of a text that must be one of ``allowed``."""

    def form(value: Any) -> str | None:
        return None if not isinstance(value, str) or value in allowed else f"{_shown(value)} is none of {list(allowed)}"

    return form


def parse_quantity(value: Any) -> Decimal | None:
    """Return the number that a quantity such as ``64Gi``, ``500m`` or ``8`` means; None if it is not a quantity."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        return None
    number, unit = match.groups()
    try:
        return Decimal(number + unit) if unit and unit[0] in "eE" and len(unit) > 1 else Decimal(number) * _unit(unit)
    except InvalidOperation:
        return None


def _unit(unit: str | None) -> Decimal:
    return _UNITS[unit] if unit else Decimal(1)


def quantity(value: Any) -> str | None:
    """Require the form of a quantity, a number with a unit; the number must not be negative."""
    if not isinstance(value, int | float | str):
        return None
    number = parse_quantity(value)
    if number is None:
        return f"{_shown(value)} must be a number with a unit, such as 64Gi, 500m or 8"
    return f"{_shown(value)} must not be negative" if number < 0 else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"
