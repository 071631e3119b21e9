"""Processes that end when their parent ends, for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def end_with_parent(parent_pid: int, death_signal: signal.Signals) -> None:
    """Make this process get ``death_signal`` when its parent ends, or at once if the parent has already ended.

    Linux supports this (prctl(2)), with two limitations. The "parent" is the *thread* that started this process, so
    that thread must live as long as the parent process. A parent that ended before the call is not noticed, so this
    function also checks the parent's id. On other systems a thread checks the parent twice a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), death_signal)
    threading.Thread(target=_watch, args=(parent_pid, death_signal), name="parent-watch", daemon=True).start()


def _watch(parent_pid: int, death_signal: signal.Signals) -> None:
    # A signal that the main thread blocks for a while must stay pending, not be delivered to this thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), death_signal)
