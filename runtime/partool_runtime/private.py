"""Folders and files that nobody but this user can write: the only ones from which compiled code is loaded.

Code that a process keeps for the next process is code that anyone who can write to its folder makes the next process
run. A folder here belongs to this user and has mode 0700; no folder above it lets another user replace it. A file in it
has the hash of its content in its name, so that a file which was damaged, or left by another writer while the folder
was open to all, is not loaded.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path

_DIGITS = 16
"""Hexadecimal digits of a hash in a file's name."""
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class NotPrivateError(Exception):
    """Another user can write to a folder or replace it; the text says which, and how."""


def private_folder(path: Path) -> Path:
    """Return a folder that only this user can write to, with its symbolic links above resolved; it is made if missing.

    Raises NotPrivateError, or OSError if the folder cannot be made.
    """
    parent = Path(os.path.realpath(path.parent))
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in (parent, *parent.parents):
        _check_above(folder, folder.lstat())
    folder = parent / path.name
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotPrivateError(f"{folder} is a link or a file, not a folder")
    if status.st_uid != os.geteuid():
        raise NotPrivateError(f"{folder} belongs to the user {status.st_uid}, and this process is {os.geteuid()}'s")
    if status.st_mode & 0o022:
        raise NotPrivateError(f"other users can write to {folder} (mode {stat.S_IMODE(status.st_mode):04o})")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _check_above(folder: Path, status: os.stat_result) -> None:
    """Raise NotPrivateError if another user than root could replace what lies in a folder."""
    if status.st_uid not in (0, os.geteuid()):
        raise NotPrivateError(f"{folder} belongs to the user {status.st_uid}, who can replace what is in it")
    # Where every user has a group of the same number, umask 002 is usual, and the group has no other members.
    of_all = 0o002 if status.st_gid == os.getegid() == os.geteuid() else 0o022
    if status.st_mode & of_all and not status.st_mode & stat.S_ISVTX:
        raise NotPrivateError(f"other users can write to {folder} (mode {stat.S_IMODE(status.st_mode):04o})")


def kept_file(folder: Path, name: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """Return the file ``NAME-<hash of its content>SUFFIX`` of a private folder; ``make`` writes it if there is none.

    A file whose content has another hash, or that another user owns or can write to, counts as missing. ``make`` gets a
    path that no other process uses; the file then gets its name at once, as several processes may make it.
    """
    for file in sorted(folder.glob(f"{name}-*{suffix}")):
        if _is_sound(file, file.name.removeprefix(f"{name}-").removesuffix(suffix)):
            return file
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        made = Path(unfinished) / f"made{suffix}"
        make(made)
        made.chmod(0o600)
        target = folder / f"{name}-{_hash(made)}{suffix}"
        made.replace(target)
    return target


def _is_sound(file: Path, digits: str) -> bool:
    status = file.lstat()
    mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return mine and _hash(file) == digits


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGITS]


def keep_compiled_code_private(environment: MutableMapping[str, str]) -> None:
    """Name a private folder for what torch compiles, where the environment names none.

    torch's own default is a folder in /tmp with a name that anyone can foresee and make first; torch loads libraries
    and pickles from it. If the folder of this user is not private, this process and the processes that it starts get a
    new one.
    """
    if environment.get(INDUCTOR_CACHE):
        return
    try:
        folder = private_folder(Path(tempfile.gettempdir()) / f"partool-{os.geteuid()}")
    except (NotPrivateError, OSError):
        folder = Path(tempfile.mkdtemp(prefix="partool-"))
    environment[INDUCTOR_CACHE] = str(folder / "inductor")
