"""Tests begin their processes with the usual signal handlers, and what a failed test started is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE
from processes import is_running

_TESTS = """
import os, signal, subprocess, sys

CHILD = '''
import os, signal, subprocess, sys, time
print(signal.getsignal(signal.SIGHUP) is signal.SIG_DFL, os.getpid(), flush=True)
if sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
'''

def start(**how):
    command = [sys.executable, "-c", CHILD, *[CHILD] * how.pop("deep")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how)

def test_that_fails():
    child = start(deep=1, start_new_session=True)
    for _ in range(2):
        print("child", child.stdout.readline())
    assert False

def test_that_follows():
    os.kill(os.getpid(), signal.SIGHUP)  # this process goes on ignoring it

def test_that_passes():
    global child
    child = start(deep=0)
    print("kept", child.stdout.readline())

def test_that_ends_it():
    assert child.poll() is None
    child.kill()
    child.communicate()
"""


@pytest.mark.timeout(120)
def test_a_failed_test_leaves_nothing_under_nohup(tmp_path: Path) -> None:
    """Neither its child nor the child's child in a session of its own, nor open pipes, which are errors here."""
    (tmp_path / "test_it.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "processes", "-p", "no:cacheprovider", "-W", "error"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = subprocess.run(
            [*command, "--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path / "test_it.py")],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "1 failed, 3 passed" in done.stdout
    children = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("child ")]
    assert [usual for usual, _ in children] == ["True", "True"]
    until = time.monotonic() + 10 * PATIENCE  # a killed process takes a moment to end
    while any(is_running(int(pid)) for _, pid in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for _, pid in children if is_running(int(pid))]
