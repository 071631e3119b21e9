"""What is said of an import: the spec's text, and the findings about settings that have no place in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from partool.diagnostics.record import Diagnostic
from partool.engines.read import Imported
from partool.engines.settings import Setting


def spec_text(found: Imported, *paths: Path) -> str:
    """Return the spec as YAML, with the settings that were not understood as remarks."""
    names, kind = ", ".join(path.name for path in paths), "a file" if len(paths) == 1 else "files"
    lines = [f"# Read from {names}, {kind} of {found.engine}; devices and data are not in such files."]
    lines += [
        f"# {fate.kind.replace('understood', 'understood, and not priced')}: {fate.setting.name} "
        f"({line_of(fate.setting, found)})"
        for fate in found.fates
        if fate.kind in ("not understood", "not priced")
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(found.spec, sort_keys=False, width=110)


def line_of(setting: Setting, found: Imported) -> str:
    """Return a setting's line, with the name of its file if there are several."""
    several = len({fate.setting.file for fate in found.fates}) > 1
    return f"{Path(setting.file).name}, line {setting.line}" if several else f"line {setting.line}"


def findings_of(found: Imported) -> list[Diagnostic]:
    """Return the findings of an import, and a warning for each setting that nobody knows."""
    unknown = [
        Diagnostic(
            "PT823", f"{fate.setting.name} is not understood, and not priced", "warning", span=fate.setting.span,
            help="remove it, or make sure that it changes neither memory nor time",
        )
        for fate in found.fates
        if fate.kind == "not understood"
    ]  # fmt: skip
    return [*found.findings, *unknown]


def given(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``key=value`` texts by key; raises ``ValueError`` for a text of another form."""
    found = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ValueError(f"--set takes key=value, as training.sequence_length=4096, not {text!r}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"the value of --set {key} is no YAML: {value!r}") from None
    return found
