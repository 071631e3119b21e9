"""Secret variables of the ranks. They go from a file into the environment and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from partool.spec.launch import LaunchSpec, Secret
from partool_runtime.errors import ConfigurationError

_MOST_BYTES = 100_000
"""The kernel takes 128 KiB per variable (execve(2), MAX_ARG_STRLEN)."""


def read_secrets(launch: LaunchSpec) -> dict[str, str]:
    """Return the secrets that come from files, less one trailing newline.

    Raises ConfigurationError PT584, naming variable and file but never the content.
    """
    found = {}
    for name, secret in launch.secrets.items():
        if launch.target == "k8s" and secret.secret is not None:
            _expect(name, secret)
        elif secret.file is not None:
            found[name] = _read(name, Path(secret.file))
        else:
            _expect(name, secret)
    return found


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
        raise ConfigurationError("PT584", f"{what}: it is no UTF-8 text", fix) from None
    if not value or "\0" in value:
        raise ConfigurationError("PT584", f"{what}: it is empty or holds a zero byte", fix)
    return value


def _expect(name: str, secret: Secret) -> None:
    if name not in os.environ:
        where = f"the Kubernetes Secret {secret.secret}" if secret.secret else "a file"
        message = f"the secret {name} should come from {where}, but the agent's environment does not have it"
        raise ConfigurationError("PT584", message, "start it as partool renders it, or name a file: launch.secrets")
