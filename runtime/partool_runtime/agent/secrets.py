"""Secrets: variables of the ranks, read from files into the environment, and the agents' key."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from partool.plan.run import KEY_FILE, KEY_VARIABLE
from partool.spec.launch import LaunchSpec, Secret
from partool.strategies.targets import TARGETS
from partool_runtime.errors import ConfigurationError

_MOST_BYTES = 100_000
"""Maximum size of a secret, below the kernel's limit of 128 KiB per variable (execve(2), MAX_ARG_STRLEN)."""
_LEAST_KEY_BYTES = 16
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links, such as file systems on object stores."""
_SETTLED_S = 1.0


def read_secrets(launch: LaunchSpec) -> dict[str, str]:
    """Return the secrets that come from files, by variable name; one trailing newline of each secret is removed.

    Raises ConfigurationError PT584, naming variable and file but never the content.
    """
    values = {}
    for name, secret in launch.secrets.items():
        if secret.secret is not None and not TARGETS[launch.target].sees_files:
            _expect(name, secret)
        elif secret.file is not None:
            values[name] = _read(name, Path(secret.file))
        else:
            _expect(name, secret)
    return values


def _read(name: str, file: Path) -> str:
    what, fix = f"the secret {name} cannot be read from {file}", "a small text file that this user can read, every node"
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigurationError("PT584", f"{what}: {error.strerror}", fix) from None
    if len(text) > _MOST_BYTES:
        raise ConfigurationError("PT584", f"{what}: it has {len(text)} bytes", fix)
    try:
        value = text.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigurationError("PT584", f"{what}: it is not UTF-8 text", fix) from None
    if not value or "\0" in value:
        raise ConfigurationError("PT584", f"{what}: it is empty or holds a zero byte", fix)
    return value


def _expect(name: str, secret: Secret) -> None:
    if name not in os.environ:
        where = f"the Kubernetes Secret {secret.secret}" if secret.secret else "a file"
        message = f"the secret {name} should come from {where}, but the agent's environment does not have it"
        raise ConfigurationError("PT584", message, "start it as partool renders it, or name a file: launch.secrets")


def agents_key(run_dir: Path, say: Callable[[str], None]) -> bytes:
    """Return the key with which a run's agents sign messages, and remove the key from this process's environment.

    The key comes from the variable ``PARTOOL_AGENT_KEY``, or else from a file in the run's folder that the first agent
    creates. Raises ConfigurationError PT584, without the content.
    """
    given = os.environ.pop(KEY_VARIABLE, None)
    if given is not None:
        if len(given.strip()) < _LEAST_KEY_BYTES:
            message = f"{KEY_VARIABLE} has {len(given.strip())} characters; a key has {_LEAST_KEY_BYTES} or more"
            raise ConfigurationError("PT584", message, "the same random text on every node: openssl rand -hex 32")
        return given.strip().encode()
    file = run_dir / KEY_FILE
    try:
        if not file.exists():
            _make_key(file)
        key = file.read_bytes().strip()
        open_to_others = file.stat().st_mode & 0o077
    except OSError as error:
        fix = f"make the run's folder writable, or set {KEY_VARIABLE} to the same random text on every node"
        raise ConfigurationError("PT584", f"the agents' key {file}: {error.strerror}", fix) from None
    if len(key) < _LEAST_KEY_BYTES:
        message = f"the agents' key {file} has {len(key)} bytes; a key has {_LEAST_KEY_BYTES} or more"
        raise ConfigurationError("PT584", message, "delete the file: the next start makes another")
    if open_to_others:
        say(f"note: {file} can be read by other users: this file system keeps no permissions")
    return key


def _make_key(file: Path) -> None:
    """Create the key file atomically; if several nodes create a key file at the same time, all nodes use one key."""
    temporary = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as made:
        made.write(secrets.token_hex(32) + "\n")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not file.exists():  # if several nodes do this at once, the last file is in place before any node reads it
            os.replace(temporary, file)
            time.sleep(_SETTLED_S)
    finally:
        temporary.unlink(missing_ok=True)
