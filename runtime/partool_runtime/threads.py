"""Threads of a rank. Each works on the device of the thread that starts it, as CUDA starts threads on device 0.

A thread on device 0 opens a context there, in every rank of a node: several hundred MiB of another rank's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def start(target: Callable[[], object], name: str) -> threading.Thread:
    """Run ``target`` in a new daemon thread on the caller's device.

    Daemon threads do not keep a failed process alive.
    """
    settle = _same_device()

    def run() -> None:
        settle()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def executor(name: str) -> ThreadPoolExecutor:
    """Return an executor with one thread, which works on the caller's device."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=_same_device())


def _same_device() -> Callable[[], None]:
    """Return a function that gives the thread that calls it the device of the present thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    index = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(index)
