"""The process whose copies are the ranks of parity tests: it imports torch and the runtime once, and never computes.

A copy of a process that has computed a backward pass would miss the threads of autograd's engine.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent ends."""


@dataclass(frozen=True)
class Start:
    """Asks the server for ranks, which connect to ``address`` and write their output to ``logs``."""

    address: str
    ranks: int
    logs: Path
    modules: tuple[str, ...]
    """Imported before the ranks are copied."""
    path: tuple[str, ...]


@dataclass(frozen=True)
class Reap:
    """Asks the server for the exit statuses of ranks that are ending."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """Asks a rank to call a function; ``port`` is free for a process group of this call."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    port: int


@dataclass(frozen=True)
class Answer:
    """The value that a call returned, or the text of the exception that it raised."""

    value: Any
    error: str | None = None


def serve(address: str) -> None:
    """Copy this process on request until the other end of the connection is closed."""
    _end_with_parent()
    gc.disable()  # modules stay: looking for garbage takes a tenth of the time of their imports
    with Client(address) as connection:
        import torch

        _prepare()
        torch.set_num_threads(1)
        connection.send("ready")
        while True:
            try:
                order = connection.recv()
            except EOFError:
                return
            if isinstance(order, Reap):
                connection.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in order.pids])
            else:
                connection.send(_started(order, connection))


def _prepare() -> None:
    """Do once what each rank's first run would do: import what is imported when it is needed, and build a plan's model.

    Without it, that takes every rank more than a second of its processor.
    """
    import partool_runtime.jobs.train.trainer
    import partool_runtime.parallel
    from partool.plan.types import Plan

    Plan.model_rebuild()
    package = partool_runtime.parallel
    for name in (*(module.name for module in walk_packages(package.__path__, f"{package.__name__}.")), *_LATER):
        importlib.import_module(name)


_LATER = (
    "numpy.ma", "partool_kernels.registry.aiter", "partool_kernels.registry.aiter_csv",
    "partool_kernels.registry.extra", "partool_kernels.registry.vllm", "torch._subclasses.schema_check_mode",
    "torch.utils.serialization",
)  # fmt: skip
"""Modules that a run imports within functions."""


def _started(order: Start, connection: Connection) -> Answer:
    """Return the process ids of the new ranks."""
    try:
        sys.path[:] = order.path
        for module in order.modules:
            importlib.import_module(module)
    except Exception:
        return Answer(None, traceback.format_exc())
    gc.freeze()  # looking for garbage in what ranks share would copy it to each of them
    return Answer([_copied(order, rank, connection) for rank in range(order.ranks)])


def _copied(order: Start, rank: int, connection: Connection) -> int:
    if pid := os.fork():
        return pid
    try:
        connection.close()
        gc.enable()
        _end_with_parent()
        output = os.open(order.logs / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(order.ranks)}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        _work(order.address, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _work(address: str, rank: int) -> None:
    """Answer calls until the connection is closed."""
    with Client(address) as connection:
        connection.send(rank)
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                os._exit(0)
            try:
                call: Call = pickle.loads(request)
                os.environ["MASTER_PORT"] = str(call.port)
                answer = pickle.dumps(Answer(call.function(*call.arguments)))
            except Exception:
                answer = pickle.dumps(Answer(None, traceback.format_exc()))
            sys.stdout.flush()
            connection.send_bytes(answer)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
