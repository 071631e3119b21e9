"""Creation, replacement and deletion of folders: a process killed at any point leaves only whole checkpoints behind.

Names other than ``step-N``: ``.tmp`` is being written, ``.trash`` is being deleted, ``.old`` is being replaced by a new
``step-N``, ``.aside`` belongs to a run that was later continued from an earlier step (kept until the user deletes it).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path

from partool_runtime.checkpoint._files import Files
from partool_runtime.checkpoint._manifest import is_intact, step_folder, steps_in

TEMPORARY = ".tmp"
_TRASH = ".trash"
_OLD = ".old"
_ASIDE = ".aside"
_LEFTOVER = re.compile(r"^(step-\d{8,})(\.tmp|\.trash|\.old)$")
_log = logging.getLogger(__name__)


def clean(folder: Path, files: Files) -> None:
    """Remove folders that a dead run left half-written or half-deleted; restore a folder that the run was replacing."""
    for entry in sorted(folder.iterdir()):
        match = _LEFTOVER.match(entry.name)
        if not match or not entry.is_dir():
            continue
        original = folder / match[1]
        if match[2] == _OLD and not original.exists():
            files.rename(entry, original)
        else:
            _delete(entry, files)


def publish(folder: Path, step: int, temporary: Path, files: Files) -> None:
    """Rename a complete temporary folder to ``step-N``, replacing an older one; rename later steps to ``.aside``.

    Later steps exist only if this run resumed from an earlier step; if they stayed, the next resume would choose them.
    """
    set_aside_after(folder, step, files)
    target = step_folder(folder, step)
    old = target.with_name(target.name + _OLD)
    if target.exists():
        files.rename(target, old)
    files.rename(temporary, target)
    files.sync_folder(folder)


def set_aside_after(folder: Path, step: int, files: Files) -> list[str]:
    """Rename the checkpoints of later steps to ``.aside``, the newest first; returns their new names."""
    names = []
    for later in reversed(steps_in(folder)):
        if later > step:
            aside = _free_name(step_folder(folder, later), _ASIDE)
            files.rename(step_folder(folder, later), aside)
            names.append(aside.name)
    return names


def retain(
    folder: Path, keep: int, files: Files, *, also: Collection[int | None] = (), until: int | None = None
) -> None:
    """Delete all but the ``keep`` newest complete checkpoints; failed deletions are only logged.

    The checkpoints of the steps ``also`` are kept, too. Checkpoints after ``until`` are kept and do not count in
    ``keep``.
    """
    kept = 0
    doomed = [entry for entry in folder.iterdir() if _LEFTOVER.match(entry.name)]
    for step in reversed(steps_in(folder)):
        path = step_folder(folder, step)
        if until is not None and step > until:
            continue
        if kept >= keep:
            doomed += [path] if step not in also else []
        elif is_intact(path, content=False):
            kept += 1
    for path in doomed:
        try:
            _delete(path, files)
        except OSError as error:
            _log.warning("cannot delete %s: %s", path, error)


def _delete(path: Path, files: Files) -> None:
    trash = path.with_name(path.name.split(".")[0] + _TRASH)
    if path != trash:
        files.remove_folder(trash)
        files.rename(path, trash)
    files.remove_folder(trash)


def _free_name(path: Path, suffix: str) -> Path:
    candidate = path.with_name(path.name + suffix)
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}{suffix}{number}")
    return candidate
