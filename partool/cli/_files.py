"""Files that commands write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from partool.cli._runs import fail


def write_or_exit(text: str, path: Path) -> None:
    """Write a file in one step: a reader sees the old file or the new one. Ends the command where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        fail("PT002", f"{path} cannot be written: {error.strerror}", "choose another file", 3)
