"""Measurements on this machine's devices, kept in the user's cache folder for later processes."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, TypedDict, cast

FORMAT = 1


def folder() -> Path:
    """Return ``$XDG_CACHE_HOME/partool/kernels``, by default below ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "partool" / "kernels"


class StoredAnswer(TypedDict):
    """Which candidate is fastest, and how that was found out."""

    names: list[str]
    """Names of all candidates."""
    name: str
    seconds: dict[str, float]
    excluded: dict[str, str]
    """Reasons by name."""


class Store:
    """A device's JSON file of answers by key, all measured with the same library versions.

    A file that cannot be read counts as empty, and a file that cannot be written is left unchanged; both give a
    warning. Files of other library versions are replaced. Many processes may write; each process adds its answers.
    """

    def __init__(self, device: str, versions: dict[str, str], root: Path | None = None) -> None:
        """Store the device's name, and the versions that answers depend on."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower() or "device"
        self.path = (root or folder()) / f"{name}.json"
        self._device, self._versions = device, versions

    def read(self) -> dict[str, StoredAnswer]:
        """Return all stored answers."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"cannot be read and is ignored: {error}")
            return {}
        if not _is_whole(content):
            self._warn("is not what partool wrote, and is ignored")
            return {}
        same = (
            content["format"] == FORMAT and content["device"] == self._device and content["versions"] == self._versions
        )
        return cast("dict[str, StoredAnswer]", content["answers"]) if same else {}

    def put(self, key: str, answer: StoredAnswer) -> None:
        """Add an answer; the file is replaced atomically, so that no other process reads an incomplete file."""
        content = {
            "format": FORMAT,
            "device": self._device,
            "versions": self._versions,
            "answers": self.read() | {key: answer},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=1, sort_keys=True)
                os.replace(name, self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            self._warn(f"cannot be written: {error}")

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self.path} {what}", RuntimeWarning, stacklevel=3)


def _is_whole(content: Any) -> bool:
    if not isinstance(content, dict) or not {"format", "device", "versions", "answers"} <= content.keys():
        return False
    answers = content["answers"]
    return isinstance(answers, dict) and all(
        isinstance(answer, dict) and isinstance(answer.get("name"), str) for answer in answers.values()
    )
