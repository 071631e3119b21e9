"""Pools of gloo ranks for parity tests: started once per test file and world size, and fed case after case.

A case that raises, hangs or loses a rank fails by itself; the next case gets new ranks. Ranks are copies of one
process that has imported everything (:mod:`_rank_server`), so that new ones take milliseconds.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import _rank_server as server
import torch.distributed as dist
from patience import PATIENCE
from ports import free_port
from processes import lasting
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from partool_runtime.mesh import close_ranks

GRACE_S = 5.0
"""Time in which the other ranks may fail too once one has failed."""
OUTPUT = 6000
"""Characters shown of a rank's output, from its end."""


class RankError(AssertionError):
    """A case failed on some ranks; the text holds their tracebacks and output."""


class Server:
    """The process that ranks are copies of, once per session. Use it as a context, which ends it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        with Listener(str(self._folder / "server")) as listener:
            start = "import _rank_server, sys; _rank_server.serve(sys.argv[1])"
            own = {"PYTHONPATH": str(Path(server.__file__).parent), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
            command = [sys.executable, "-W", "ignore", "-c", start, str(self._folder / "server")]
            self._process = subprocess.Popen(command, env=lasting(os.environ) | own | {"PYTHONWARNINGS": "error"})
            self._connection = listener.accept()
        self._connection.recv()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
        self._process.wait(30)
        shutil.rmtree(self._folder)

    def start(self, ranks: int, module: str) -> Pool:
        """Return new ranks, which have imported a module."""
        logs = Path(tempfile.mkdtemp(dir=self._folder))
        with Listener(str(logs / "socket")) as listener:
            answer = self._ask(server.Start(str(logs / "socket"), ranks, logs, (module,), tuple(sys.path)))
            if answer.error is not None:
                raise RankError(answer.error)
            found = [listener.accept() for _ in range(ranks)]
            by_rank = {connection.recv(): connection for connection in found}
        return Pool([by_rank[rank] for rank in range(ranks)], answer.value, logs, self._ask)

    def _ask(self, order: server.Start | server.Reap) -> Any:
        try:
            self._connection.send(order)
            return self._connection.recv()
        except BaseException:
            self._connection.close()  # its answer is still to come, and nobody may take it for another one
            raise


class Pools:
    """The pools of one test file, by world size. Use it as a context, which ends all ranks."""

    def __init__(self, started_by: Server) -> None:
        self._server = started_by
        self._pools: dict[int, Pool] = {}

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pool in self._pools.values():
            pool.close()

    def run(
        self,
        ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 90,
        lost: Sequence[int] = (),
    ) -> list[Any]:
        """Call a function on so many ranks; return the value of each.

        Args:
            ranks: The world size. Environment variables are those that ``torchrun`` sets.
            function: A function of a module; ranks import the module by its name.
            arguments: Values that can be pickled.
            timeout_s: Time for the call on all ranks.
            lost: Ranks that end in the call, as it is meant; their value is None, and the pool is closed.

        Raises:
            RankError: The function raised on a rank, a rank ended, or the time is up.
        """
        pool = self._pools.get(ranks)
        if pool is None:
            pool = self._pools[ranks] = self._server.start(ranks, function.__module__)
        try:
            values = pool.run(function, arguments, timeout_s * PATIENCE, lost)
        except RankError:
            del self._pools[ranks]
            raise
        except BaseException:  # a test's own timeout: an answer that comes later must not be taken for the next case's
            self.close(ranks)
            raise
        if lost:
            statuses = self._pools.pop(ranks).close()
            assert {statuses[rank] for rank in lost} <= {0, -signal.SIGKILL}, statuses
        return values

    def close(self, ranks: int) -> None:
        """End the ranks of a world size; the next case starts new ones."""
        if ranks in self._pools:
            self._pools.pop(ranks).close()


class Pool:
    """Ranks that wait for calls. One failed call ends them all."""

    def __init__(
        self, connections: list[Connection], pids: list[int], logs: Path, ask: Callable[[server.Reap], Any]
    ) -> None:
        self._connections = connections
        self._pids = pids
        self._logs = logs
        self._ask = ask

    def run(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float, lost: Sequence[int]
    ) -> list[Any]:
        """Return each rank's value of a call; see :meth:`Pools.run`."""
        request = pickle.dumps(server.Call(function, arguments, free_port()))
        for connection in self._connections:
            with suppress(OSError):  # a rank that has died meanwhile is found by its missing answer
                connection.send_bytes(request)
        answers, ended = self._answers(time.monotonic() + timeout_s, lost)
        failed = [rank for rank, answer in answers.items() if answer.error is not None]
        if len(answers) + len(ended) == len(self._connections) and ended == set(lost) and not failed:
            return [answers[rank].value if rank in answers else None for rank in range(len(self._connections))]
        for rank, pid in enumerate(self._pids):
            if rank not in answers and rank not in ended:
                os.kill(pid, signal.SIGUSR1)  # its stacks go to its log
        time.sleep(0.3)
        statuses = self._end()
        lines = []
        for rank, status in enumerate(statuses):
            answer = answers.get(rank)
            if (answer.error is not None) if answer is not None else rank not in ended or rank not in lost:
                end = answer.error if answer is not None else _ended(status, timeout_s)
                output = (self._logs / f"rank-{rank}.txt").read_text(errors="replace")[-OUTPUT:]
                lines.append(f"rank {rank}: {end}\n{output}")
        raise RankError("\n".join(lines))

    def close(self) -> list[int]:
        """End the ranks; return their exit codes, negative for signals."""
        return self._end()

    def _answers(self, until_s: float, lost: Sequence[int]) -> tuple[dict[int, server.Answer], set[int]]:
        """Return answers by rank, and the ranks that ended without one."""
        found: dict[int, server.Answer] = {}
        ended: set[int] = set()
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting and (left_s := until_s - time.monotonic()) > 0:
            for ready in wait(list(waiting), left_s):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    found[rank] = pickle.loads(ready.recv_bytes())
                    failed = found[rank].error is not None
                except (EOFError, ConnectionResetError):
                    ended.add(rank)
                    failed = rank not in lost
                if failed:
                    until_s = min(until_s, time.monotonic() + GRACE_S)
        return found, ended

    def _end(self) -> list[int]:
        """Kill the ranks; return their exit codes, negative for signals."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)  # a pid is its rank's until the server has reaped it
        for connection in self._connections:
            connection.close()
        return list(self._ask(server.Reap(tuple(self._pids))))


class Results:
    """Values that rank 0 returns for named cases. A case runs on first access; if it fails, each access raises."""

    def __init__(self, pools: Pools, ranks: int, work: Callable[[str], Any], timeout_s: float = 90) -> None:
        self._found: dict[str, Any] = {}
        self._run = partial(pools.run, ranks, work, timeout_s=timeout_s)

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            try:
                self._found[name] = self._run(name)[0]
            except RankError as error:
                self._found[name] = error
        if isinstance(self._found[name], RankError):
            raise self._found[name]
        return self._found[name]


@contextmanager
def in_group(timeout_s: float = 90) -> Iterator[None]:
    """Hold a gloo group of all ranks for one case: each group has threads, of which many cases would have too many."""
    forget_meshes()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s * PATIENCE))
    yield
    dist.barrier()  # a rank that leaves while another still receives has crashed gloo
    close_ranks()


def forget_meshes() -> None:
    """Empty torch's cache of shardings, which holds meshes of groups that are closed."""
    _clear_sharding_prop_cache()


def joined() -> int:
    """Join the gloo group that the ranks of a pool keep, for cases with few groups; return the rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


@cache
def group_of(ranks: int) -> dist.ProcessGroup:
    """Return a gloo group of the first ranks of a pool; all its ranks must call this, in the same order."""
    joined()
    return dist.new_group(list(range(ranks)))


def named(cases: Iterable[Any]) -> dict[str, Any]:
    """Return cases, which are named tuples or dataclasses, by what distinguishes them from their class's defaults."""
    found: dict[str, Any] = {}
    for case in cases:
        fields = case._asdict() if hasattr(case, "_asdict") else vars(case)
        defaults = getattr(case, "_field_defaults", None) or {
            field.name: field.default for field in getattr(type(case), "__dataclass_fields__", {}).values()
        }
        words = [
            _word(name, value) for name, value in fields.items() if name not in defaults or defaults[name] != value
        ]
        name = " ".join(words)
        found[name if name not in found else f"{name} again {len(found)}"] = case
    return found


def _word(name: str, value: Any) -> str:
    if value is True:
        return name
    return value if isinstance(value, str) else f"{name}={re.sub(r'[^A-Za-z0-9._-]+', '-', str(value)).strip('-')}"


def _ended(status: int, timeout_s: float) -> str:
    if status == -signal.SIGKILL:
        return f"no answer, after {timeout_s:g} s or after another rank failed"
    return f"ended with status {status}"
