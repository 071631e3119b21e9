"""Settings of an engine as files state them, and the tables that say what becomes of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from partool.diagnostics.record import Diagnostic, Severity, Span
from partool.engines.fields import complaint

_TRUE = frozenset(("true", "yes", "on", "1", "t", "y"))
_FALSE = frozenset(("false", "no", "off", "0", "f", "n", "none", ""))


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting with its place in a file."""

    name: str
    value: Any
    """Text, number or truth value; True for a flag without value."""
    file: str
    line: int

    @property
    def span(self) -> Span:
        """The line of the setting."""
        return Span(self.file, self.line, 1, self.line, 1)


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a setting."""

    setting: Setting
    kind: Literal["carried", "no effect", "not priced", "not understood"]
    text: str
    """Path in the spec; or the reason why the setting does not change memory and time; or what it would change."""


@dataclass(frozen=True, slots=True)
class Unpriced:
    """A known setting that changes memory or time, and that a spec has no field for."""

    text: str
    """What it changes."""
    severity: Severity = "warning"
    """error: a price would be of another run; warning, note: the price is of the run without the setting."""
    off: Sequence[str] = ("0", "0.0", "False", "false", "none", "None")
    """Values with which it changes nothing."""

    def changes(self, value: Any) -> bool:
        """Return True unless ``value`` is one with which the setting changes nothing."""
        return not any(str(value) == off or real_of(value) == real_of(off) is not None for off in self.off)


_DIGITS = re.compile(r"[+-]?[0-9]{1,100}")
_LARGEST_EXACT = 2**53
"""Up to this size every whole number is a float."""
_LONGEST = 60
"""Letters of a value that a finding repeats."""


def whole_of(value: Any) -> int | None:
    """Return the whole number that a value is, exactly; None for anything else.

    Text may have an exponent, as in 5e8, which YAML takes for a word.
    """
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, str) and "." in value:
        return None
    number = real_of(value)
    return int(number) if number is not None and number.is_integer() and abs(number) <= _LARGEST_EXACT else None


def real_of(value: Any) -> float | None:
    """Return the finite number that a value is; None for anything else, NaN and infinity too."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def is_off(value: Any) -> bool:
    """Return whether a value is a way to write false."""
    return isinstance(value, (bool, int, float, str)) and str(value).strip().lower() in _FALSE


def shown(value: Any) -> str:
    """Return a value as a finding shows it, cut where it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number of thousands of digits"
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…, of {len(text)} letters"
    return repr(text) if isinstance(value, str) else text


_NAMED = 4
"""Settings that a finding about several of them names."""


@dataclass
class Sheet:
    """Settings of one run; every setting that is asked for counts as carried."""

    settings: Mapping[str, Setting]
    findings: list[Diagnostic] = field(default_factory=list)
    carried: dict[str, str] = field(default_factory=dict)
    """Path in the spec by the name of a setting."""

    def get(self, name: str, default: Any = None, *, to: str) -> Any:
        """Return a setting's value, or ``default``; it is carried to the path ``to`` of the spec."""
        setting = self.settings.get(name)
        if setting is None:
            return default
        self.carried[name] = to
        return setting.value

    def number(self, name: str, default: Any = None, *, to: str, least: float = 0.0, derived: bool = False) -> Any:
        """Return a setting's finite number from ``least`` on, or ``default``; a finding and ``default`` if it is none.

        What the field ``to`` of a spec cannot hold is a finding, too, unless the field is only ``derived`` from the
        setting, or ``least`` allows 0: that says that something is off.
        """
        value = self.get(name, to=to)
        if value is None:
            return default
        exact = whole_of(value)
        number = real_of(value) if exact is None else exact
        if number is None:
            self._wrong(name, value, "a number is expected", to)
            return default
        reason = None if derived or (number == 0 and least <= 0) else complaint(to, number)
        if number < least:
            reason = f"it should be at least {least:g}"
        if reason is not None:
            self._wrong(name, value, reason, to)
            return default
        return number

    def integer(
        self,
        name: str,
        default: Any = None,
        *,
        to: str,
        least: int = 1,
        off: Sequence[int] = (),
        derived: bool = False,
    ) -> Any:
        """Return a setting's whole number from ``least`` on, or ``default``; a finding and ``default`` if it is none.

        Numbers in ``off`` are returned as they are: with them, the system takes a value of its own. What the field
        ``to`` of a spec cannot hold is a finding, too, unless the field is only ``derived`` from the setting.
        """
        value = self.get(name, to=to)
        if value is None:
            return default
        number = whole_of(value)
        if number is not None and (number in off or (number == 0 and least <= 0)):
            return number
        reason = "a whole number is expected" if number is None else None if derived else complaint(to, number)
        if number is not None and number < least:
            reason = f"a whole number from {least} on is expected"
        if reason is None:
            return number
        self._wrong(name, value, reason, to)
        return default

    def _wrong(self, name: str, value: Any, reason: str, to: str) -> None:
        fix = f"write a number that it can be; --set {to}=NUMBER overrides it"
        place = tuple(to.split("."))
        message = f"{name} is {shown(value)}, and {reason}"
        finding = Diagnostic("PT820", message, path=place, help=fix, span=self.settings[name].span)
        if finding not in self.findings:  # several fields may follow from one setting
            self.findings.append(finding)

    def flag(self, name: str, default: bool = False, *, to: str) -> bool:
        """Return a setting's truth value, or ``default``; files and command lines write it in several ways."""
        value = self.get(name, default, to=to)
        if isinstance(value, bool) or value is None:
            return bool(value)
        word = str(value).strip().lower()
        if word not in _TRUE and word not in _FALSE:
            message = f"{name} is {shown(value)}, and true or false is expected"
            place = tuple(to.split("."))
            where = self.settings[name].span
            self.findings.append(Diagnostic("PT820", message, path=place, help="true or false", span=where))
            return default
        return word in _TRUE

    def switch(self, name: str, *, to: str) -> Any:
        """Return a setting that is on where it stands, with its value; None where it does not stand.

        A value that reads as off is a finding: the system has no such form, and takes the switch for on.
        """
        value = self.get(name, to=to)
        if isinstance(value, str) and value.strip().lower() in _FALSE - {""}:
            message = f"--{name} {value}: the argument takes no value, and is on wherever it stands"
            self.say("PT820", "error", message, f"remove --{name}", name)
        return value

    def any(self, *names: str, to: str) -> bool:
        """Return True if one of the settings is on; all of them are carried."""
        on = [bool(self.switch(name, to=to)) for name in names]
        return True in on

    def say(self, code: str, severity: Severity, message: str, fix: str, *names: str) -> None:
        """Add a finding at the first of the settings ``names`` that is there."""
        where = next((self.settings[name] for name in names if name in self.settings), None)
        self.findings.append(Diagnostic(code, message, severity, help=fix, span=where.span if where else None))

    def lacks(self, path: str, what: str, *names: str) -> None:
        """Add a finding: the files do not say ``what``, which has its place in the spec at ``path``.

        Nothing is added where they say it wrongly, which is a finding already.
        """
        if any(each.code == "PT820" and each.path == tuple(path.split(".")) for each in self.findings):
            return
        where = next((self.settings[name] for name in names if name in self.settings), None)
        fix = f"add --set {path}=VALUE"
        place = tuple(path.split("."))
        self.findings.append(Diagnostic("PT822", what, path=place, help=fix, span=where.span if where else None))


def left_out(sheet: Sheet, table: Mapping[str, Unpriced]) -> None:
    """Add a finding for each setting that changes memory or time and that is not carried."""
    groups = dict[tuple[Severity, str], list[str]]()
    for name, setting in sheet.settings.items():
        unpriced = table.get(name)
        if unpriced is not None and name not in sheet.carried and unpriced.changes(setting.value):
            groups.setdefault((unpriced.severity, unpriced.text), []).append(name)
    for (severity, text), names in groups.items():
        rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = ", ".join(names[:_NAMED]) + rest
        if severity == "error":
            fix = "remove it to price the run without it"
            sheet.say("PT823", "error", f"{listed}: it {text}, for which there is no field", fix, *names)
        else:
            fix = "the price is of the run without it"
            sheet.say("PT824", severity, f"{listed}: it {text}, which is not priced", fix, *names)


def fates(sheet: Sheet, no_effect: Mapping[str, str], table: Mapping[str, Unpriced] | None = None) -> list[Fate]:
    """Return what became of every setting; ``no_effect`` has reasons by name, ``table`` what else is known."""
    outcomes = []
    for name, setting in sheet.settings.items():
        unpriced = table.get(name) if table else None
        if name in sheet.carried:
            outcomes.append(Fate(setting, "carried", sheet.carried[name]))
        elif unpriced is not None and unpriced.changes(setting.value):
            outcomes.append(Fate(setting, "not priced", unpriced.text))
        elif unpriced is not None:
            outcomes.append(Fate(setting, "no effect", "it is off"))
        elif name in no_effect:
            outcomes.append(Fate(setting, "no effect", no_effect[name]))
        else:
            outcomes.append(Fate(setting, "not understood", ""))
    return outcomes
