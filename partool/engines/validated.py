"""Checks the spec that an import makes against the spec's own rules; what is wrong is said where the file says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.engines.settings import Fate, Setting, shown
from partool.spec.loader import load_text

_OF_FIELDS = "PT1"
"""Codes about one field begin with this; the others are about several."""


def made_of(paths: Sequence[Path | str]) -> str:
    """Return the name under which findings show the spec made of some files."""
    return f"the spec that partool import makes of {' '.join(str(path) for path in paths)}"


def wrong_in(text: str, name: str, fates: Sequence[Fate], *, complete: bool) -> Iterator[Diagnostic]:
    """Yield the errors of a spec's text, at the settings that became the fields in question.

    Errors about fields that no setting became are at their place in the text, whose name is ``name``. Unless the spec
    is ``complete``, errors are left out that may follow from what is missing.
    """
    for error in load_text(text, name).diagnostics:
        if error.severity != "error":
            continue
        setting = _setting_of(tuple(map(str, error.path)), fates)
        if setting is None:
            if complete:
                yield error
        elif error.code.startswith(_OF_FIELDS):
            field = ".".join(map(str, error.path))
            message = (
                f"{setting.name} is {shown(setting.value)}, which makes {field} of the spec wrong: {error.message}"
            )
            yield Diagnostic("PT820", message, path=error.path, help=error.help, span=setting.span)
        elif complete:
            message = f"{setting.name}: {error.message} ({error.code})"
            yield Diagnostic("PT823", message, path=error.path, help=error.help, span=setting.span)


def _setting_of(path: tuple[str, ...], fates: Sequence[Fate]) -> Setting | None:
    """Return the setting that became the field at a path, or one that holds the field or is held by it."""
    best, most = None, 1  # a whole section says nothing
    for fate in fates:
        if fate.kind != "carried":
            continue
        other = tuple(fate.text.split("."))
        shared = next((at for at, (one, two) in enumerate(zip(path, other, strict=False)) if one != two), len(path))
        shared = min(shared, len(other), len(path))
        if shared > most and shared == min(len(path), len(other)):
            best, most = fate.setting, shared
    return best
