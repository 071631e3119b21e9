"""Ranks as copies of one process, which has imported everything already; for models whose library is slow to import."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""


def run_forked(ranks: int, work: Callable[[], None]) -> int:
    """Run ``work`` as so many ranks and return 0 if all went well; one that fails ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    waiting = {_forked(rank, ranks, work) for rank in range(ranks)}
    failed = 0
    while waiting:
        pid, status = os.wait()
        waiting.discard(pid)
        if status:
            failed += 1
            for other in waiting:
                os.kill(other, signal.SIGKILL)
    return min(failed, 1)


def _forked(rank: int, ranks: int, work: Callable[[], None]) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        # It must not outlive a parent that is killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            work()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
