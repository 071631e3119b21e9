"""Control groups with a memory limit, for processes that must live within what a pod would get."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """A control group of version 1 or 2."""

    folder: Path
    version: int

    def command(self, *words: str) -> list[str]:
        """Return a command line that runs ``words`` in the group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *words]

    def kills(self) -> int:
        """Return how many processes the kernel ended because the group was full."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        pairs = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(pairs["oom_kill"])

    def anonymous_bytes(self) -> int:
        """Return the bytes that are not pages of files, which the kernel could drop."""
        pairs = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return int(pairs["total_rss"] if self.version == 1 else pairs["anon"])


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a control group with a limit; skips the test, with the reason, where no group can be made."""
    try:
        group = _made(limit_bytes)
    except (OSError, LookupError) as error:
        pytest.skip(f"the memory controller cannot be written here: {error}")
    try:
        yield group
    finally:
        for pid in (group.folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with suppress(OSError):
                group.folder.rmdir()
                break
            time.sleep(0.05)


def _made(limit_bytes: int) -> MemoryGroup:
    rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {names: path for _, names, path in rows}
    first = next((path for names, path in own.items() if "memory" in names.split(",")), None)
    if first is not None:
        base, version, limit = _ROOT / "memory" / first.lstrip("/"), 1, "memory.limit_in_bytes"
        if not base.is_dir():  # in a container, the path is that of the host
            base = _ROOT / "memory"
    else:
        base, version, limit = _ROOT / own[""].lstrip("/"), 2, "memory.max"
        if "memory" not in (base / "cgroup.subtree_control").read_text().split():
            (base / "cgroup.subtree_control").write_text("+memory")
    group = MemoryGroup(base / f"partool-test-{os.getpid()}", version)
    group.folder.mkdir()
    try:
        (group.folder / limit).write_text(str(limit_bytes))
        subprocess.run(group.command("true"), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        group.folder.rmdir()
        raise LookupError(str(error)) from error
    return group
