"""What commands use of POSIX systems. Planning, explaining and rendering need nothing of it, and work without.

Windows lacks the modules ``fcntl`` and ``pwd``, users with numbers, process groups and ``fork``.
"""

from __future__ import annotations

import errno
import getpass
import os
from typing import IO, Any

_FOR_RANKS = ("fork", "killpg", "setsid")


def lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed or the process ends; returns False if another process has locked it.

    Raises OSError where the file system, or the operating system, has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOTSUP, "this operating system has no flock") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def user_id() -> str:
    """Return the number of this process's user, or the user's name where users have no numbers."""
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


def user_name() -> str:
    """Return the name of this process's user; the number if it has no name."""
    try:
        import pwd
    except ImportError:
        return getpass.getuser()
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return user_id()


def no_ranks() -> str:
    """Return why this operating system cannot run ranks; empty where it can."""
    missing = [name for name in _FOR_RANKS if not hasattr(os, name)]
    return f"ranks run on Linux; this operating system has no {' and no '.join(missing)}" if missing else ""
