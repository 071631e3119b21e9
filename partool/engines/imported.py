"""What is said of an import: the spec's text, and the findings about settings that have no place in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from partool.diagnostics.record import Diagnostic
from partool.engines.read import Imported
from partool.engines.settings import Setting

_NAMED = 50
"""Settings that are named one by one."""
_LONGEST = 300
"""Letters of a remark."""


def spec_text(imported: Imported, *paths: Path) -> str:
    """Return the spec as YAML, with the settings that were not understood as remarks."""
    names, kind = ", ".join(path.name for path in paths), "a file" if len(paths) == 1 else "files"
    lines = [f"# Read from {names}, {kind} of {imported.engine}; devices and data are not in such files."]
    open_ = [fate for fate in imported.fates if fate.kind in ("not understood", "not priced")]
    lines += [
        f"# {fate.kind.replace('understood', 'understood, and not priced')}: {fate.setting.name} "
        f"({line_of(fate.setting, imported)})"
        for fate in open_[:_NAMED]
    ]
    if len(open_) > _NAMED:
        lines.append(f"# and {len(open_) - _NAMED} more settings that are not priced")
    # A name with a line end in it must not begin a line of the spec.
    lines = ["".join(letter if letter.isprintable() else "?" for letter in line[:_LONGEST]) for line in lines]
    return "\n".join(lines) + "\n" + yaml.safe_dump(imported.spec, sort_keys=False, width=110)


def line_of(setting: Setting, imported: Imported) -> str:
    """Return a setting's line, with the name of its file if there are several."""
    return f"{Path(setting.file).name}, line {setting.line}" if imported.several_files else f"line {setting.line}"


def findings_of(imported: Imported) -> list[Diagnostic]:
    """Return the findings of an import, and a warning for each setting that nobody knows."""
    settings = [fate.setting for fate in imported.fates if fate.kind == "not understood"]
    help = "remove it, or make sure that it changes neither memory nor time"
    unknown = [
        Diagnostic("PT823", f"{one.name:.100} is not understood, and not priced", "warning", help=help, span=one.span)
        for one in settings[:_NAMED]
    ]
    if len(settings) > _NAMED:
        rest = f"{len(settings) - _NAMED} more settings are not understood, and not priced"
        unknown.append(Diagnostic("PT823", rest, "warning", help=help, span=settings[_NAMED].span))
    return [*imported.findings, *unknown]


def given(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``key=value`` texts by key; raises ``ValueError`` for a text of another form."""
    values = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ValueError(f"--set takes key=value, as training.sequence_length=4096, not {text!r}")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"the value of --set {key} is no YAML: {value!r}") from None
    return values
