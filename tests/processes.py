"""Processes that tests start: they begin with the usual signal handlers, and a failed test leaves none behind.

This file is a plugin of pytest.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import uuid
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import FrameType

import pytest

MARK = "PARTOOL_TEST_MARK"
"""Environment variable that a test's processes, and theirs, inherit; each test has its own value."""
_FAILED = pytest.StashKey[bool]()
_USUAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def pytest_configure() -> None:
    """Give processes that tests start the default actions of the signals that tests send.

    ``nohup`` ignores SIGHUP, a shell's ``&`` SIGINT and SIGQUIT, and processes inherit what is ignored. A handler is
    not inherited: this process goes on ignoring the signal, others do not.
    """
    for number in _USUAL:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _ignore)


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that several tests use, although one of them starts it."""
    return {name: value for name, value in environment.items() if name != MARK}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test has failed."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a failed test has started, and close its pipes, which would otherwise fail the next test."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    yield
    os.environ.pop(MARK, None)
    if has_failed(request):
        end_marked(mark)


def has_failed(request: pytest.FixtureRequest) -> bool:
    """Return True if the test of a fixture has failed."""
    return bool(request.node.stash.get(_FAILED, False))


def end_marked(mark: str) -> None:
    """Kill all processes with this mark, with their process groups, and those that the killed ones left behind."""
    while found := _marked(mark):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
        _reap(found)


def is_running(pid: int) -> bool:
    """Return True if this process exists and is no zombie, which waits only for its parent to take its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _marked(mark: str) -> set[int]:
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.add(int(entry.name))
    return found


def _reap(killed: set[int]) -> None:
    """Close the pipes of this process to those that it has killed, and take their exit codes."""
    for process in [each for each in gc.get_objects() if isinstance(each, subprocess.Popen)]:
        if process.pid in killed:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):  # what a closed pipe had not taken
                        stream.close()
            process.wait()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing."""
