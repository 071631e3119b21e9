"""Files and folders of the user's that hold configurations: which tool wrote them, and what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partool_kernels.registry import tables

if TYPE_CHECKING:
    from partool_kernels.registry.look_up import Reader
    from partool_kernels.registry.tables import Table


def load(paths: list[Path]) -> tuple[list[tuple[str, Table]], list[Reader]]:
    """Return partool's tables under some paths, with their files, and readers of the other tools' ones."""
    own: list[tuple[str, Table]] = []
    for path in paths:
        own += [(str(file), tables.read(file)) for file in ([path] if path.is_file() else sorted(path.rglob("*.json")))]
    return own, []
