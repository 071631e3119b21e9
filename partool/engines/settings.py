"""Settings of an engine as files state them, and the tables that say what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
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
    kind: Literal["carried", "no effect", "not understood"]
    text: str
    """Path in the spec, or the reason why the setting does not change memory and time."""


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
            self.say(
                "PT820",
                "error",
                f"{name} is {value!r}, and a number is expected",
                "write a number, or what the script would put there",
                name,
            )
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


def fates(sheet: Sheet, no_effect: Mapping[str, str]) -> list[Fate]:
    """Return what became of every setting; ``no_effect`` has reasons by name."""
    found = []
    for name, setting in sheet.settings.items():
        if name in sheet.carried:
            found.append(Fate(setting, "carried", sheet.carried[name]))
        elif name in no_effect:
            found.append(Fate(setting, "no effect", no_effect[name]))
        else:
            found.append(Fate(setting, "not understood", ""))
    return found
