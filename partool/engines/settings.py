"""Settings of an engine as files state them, and the tables that say what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from partool.diagnostics.record import Diagnostic, Severity, Span

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
        return not any(str(value) == off or _number(value) == _number(off) is not None for off in self.off)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


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
        found = self.settings.get(name)
        if found is None:
            return default
        self.carried[name] = to
        return found.value

    def number(self, name: str, default: Any = None, *, to: str) -> Any:
        """Return a setting's number, or ``default``; a finding and ``default`` if it is none."""
        value = self.get(name, default, to=to)
        if value is None or isinstance(value, bool):
            return default if value is not True else 1
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            message = f"{name} is {value!r}, and a number is expected"
            fix = f"write a number, or what the script would put there; --set {to}=NUMBER overrides it"
            place = tuple(to.split("."))
            self.findings.append(Diagnostic("PT820", message, path=place, help=fix, span=self.settings[name].span))
            return default
        return int(number) if number.is_integer() and "." not in str(value) else number

    def whole(self, name: str, default: int, *, to: str, least: int = 1) -> int:
        """Return a setting's whole number, which is at least ``least`` or the default itself; else a finding."""
        value = self.number(name, default, to=to)
        if isinstance(value, int) and (value >= least or value == default):
            return value
        self.say(
            "PT820", "error", f"{name} is {value}, and a whole number from {least} on is expected", "mend it", name
        )
        return default

    def flag(self, name: str, default: bool = False, *, to: str) -> bool:
        """Return a setting's truth value, or ``default``; files and command lines write it in several ways."""
        value = self.get(name, default, to=to)
        if isinstance(value, bool) or value is None:
            return bool(value)
        word = str(value).strip().lower()
        if word not in _TRUE and word not in _FALSE:
            self.say("PT820", "error", f"{name} is {value!r}, and true or false is expected", "true or false", name)
            return default
        return word in _TRUE

    def any(self, *names: str, to: str) -> bool:
        """Return True if one of the settings is on; all of them are carried."""
        on = [bool(self.get(name, False, to=to)) for name in names]
        return True in on

    def say(self, code: str, severity: Severity, message: str, fix: str, *names: str) -> None:
        """Add a finding at the first of the settings ``names`` that is there."""
        where = next((self.settings[name] for name in names if name in self.settings), None)
        self.findings.append(Diagnostic(code, message, severity, help=fix, span=where.span if where else None))

    def lacks(self, path: str, what: str, *names: str) -> None:
        """Add a finding: the files do not say ``what``, which has its place in the spec at ``path``."""
        where = next((self.settings[name] for name in names if name in self.settings), None)
        fix = f"add --set {path}=VALUE"
        place = tuple(path.split("."))
        self.findings.append(Diagnostic("PT822", what, path=place, help=fix, span=where.span if where else None))


def left_out(sheet: Sheet, table: Mapping[str, Unpriced]) -> None:
    """Add a finding for each setting that changes memory or time and that is not carried."""
    groups = dict[tuple[Severity, str], list[str]]()
    for name, setting in sheet.settings.items():
        known = table.get(name)
        if known is not None and name not in sheet.carried and known.changes(setting.value):
            groups.setdefault((known.severity, known.text), []).append(name)
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
    found = []
    for name, setting in sheet.settings.items():
        known = table.get(name) if table else None
        if name in sheet.carried:
            found.append(Fate(setting, "carried", sheet.carried[name]))
        elif known is not None and known.changes(setting.value):
            found.append(Fate(setting, "not priced", known.text))
        elif known is not None:
            found.append(Fate(setting, "no effect", "it is off"))
        elif name in no_effect:
            found.append(Fate(setting, "no effect", no_effect[name]))
        else:
            found.append(Fate(setting, "not understood", ""))
    return found
