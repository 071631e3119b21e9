"""Prove the kernels with other Triton versions than the installed one, as users of older torch releases have.

Wheels are downloaded once into the user's cache folder.
``offline.py [--all] [--most N] [--divide] [--write] VERSION...`` exits with 1 if a kernel has a fault with one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from partool_kernels.registry import ARCHITECTURES

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partool" / "triton"


def fetched(version: str) -> Path:
    """Return the folder that holds a version of Triton; an interrupted download leaves none."""
    folder = CACHE / version
    if not folder.is_dir():
        part = CACHE / f".{version}.{os.getpid()}"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        try:
            subprocess.run([*command, "--no-compile", "--target", str(part), f"triton=={version}"], check=True)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def prove(version: str, options: list[str]) -> bool:
    """Prove all kernels with a version; return True if there is no fault."""
    path = os.pathsep.join([str(fetched(version)), str(ROOT / "kernels")])
    own = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(CACHE / f"{version}-programs")}
    command = [sys.executable, "-m", "partool_kernels.offline", *options]
    done = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)
    if "--write" in options:
        print(f"Triton {version}: tables {'written' if done.returncode == 0 else 'not written'}", flush=True)
        return done.returncode == 0
    told = json.loads(done.stdout)
    if told["triton"] != ".".join(version.split(".")[:2]):
        sys.exit(f"asked for Triton {version}, but {told['triton']} was imported")
    print(f"Triton {version}: {told['programs']} programs, {told['faults']} faults, {told['seconds']} s", flush=True)
    return done.returncode == 0


def divided(versions: list[str]) -> list[list[str]]:
    """Return architectures for each version: every architecture once, those of each vendor with several versions."""
    return [list(ARCHITECTURES)[place :: len(versions)] for place in range(len(versions))]


def main() -> int:
    """Prove the kernels with each version in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--all", action="store_true", help="all programs, in float16 and float32 too")
    parser.add_argument("--most", type=int, help="programs per kernel and architecture")
    parser.add_argument("--divide", action="store_true", help="each architecture with one of the versions only")
    parser.add_argument("--write", action="store_true", help="add what modelled entries need to their tables")
    asked = parser.parse_args()
    options = [f"--{name}" for name in ("all", "write") if getattr(asked, name)]
    options += ["--most", str(asked.most)] if asked.most else []
    parts = [["--architectures", *part] if asked.divide else [] for part in divided(asked.versions)]
    sound = [prove(version, [*options, *part]) for version, part in zip(asked.versions, parts, strict=True)]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
