"""The ranks as processes, on torch elastic's local agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from partool.plan.run import LOGS, rank_command, rank_environment
from partool.plan.types import Plan
from partool_runtime._rank_logs import RankLogs
from partool_runtime._supervision import Action, Supervision
from partool_runtime.stop import STOP_SIGNALS

_LOOPBACK = "127.0.0.1"
_BLOCKED = STOP_SIGNALS | {signal.SIGHUP}


class _AttemptEndedError(Exception):
    """The ranks have ended and are not to be started again."""


def run_ranks(
    plan: Plan,
    plan_file: Path,
    run_dir: Path,
    *,
    resume: bool,
    worker: str,
    supervision: Supervision,
    next_attempt: Callable[[], int],
) -> None:
    """Start the ranks, and again after a failure as often as the plan allows; returns when they have ended for good.

    ``supervision`` then holds the last attempt's exit codes. ``next_attempt`` is called before every start and
    numbers it.
    """
    _log_to_file(run_dir / LOGS / "agent.log")
    # By default torch keeps one store over restarts, in which new ranks find their predecessors' addresses and hang
    # (pytorch#135712).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.update(rank_environment(plan))
    rendezvous = RendezvousParameters(
        "c10d", f"{_LOOPBACK}:0", run_id=run_dir.name, min_nodes=1, max_nodes=1, local_addr=_LOOPBACK
    )
    entrypoint, *arguments = rank_command(sys.executable, plan_file, run_dir, resume=resume, module=worker)
    spec = WorkerSpec(
        role=plan.job,
        local_world_size=plan.devices.per_node,
        rdzv_handler=get_rendezvous_handler(rendezvous),
        entrypoint=entrypoint,
        args=tuple(arguments),
        max_restarts=plan.launch.restarts,
        local_addr=_LOOPBACK,
    )
    logs = RankLogs(run_dir)
    try:
        _Agent(spec, logs, supervision, next_attempt).run()
    except _AttemptEndedError:
        pass
    finally:
        logs.close()
        spec.rdzv_handler.shutdown()


class _Agent(LocalElasticAgent):
    """Torch's agent with our decisions: who is asked to stop, who is killed, when another attempt is worth it."""

    def __init__(
        self, spec: WorkerSpec, logs: RankLogs, supervision: Supervision, next_attempt: Callable[[], int]
    ) -> None:
        super().__init__(spec, logs)
        self._logs = logs
        self._supervision = supervision
        self._next_attempt = next_attempt

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._supervision.begin_attempt()
        self._logs.attempt = self._next_attempt()
        # torch puts its own signal handlers in place as it starts processes, so signals wait until ours are back. The
        # ranks inherit the block and lift it when they can handle a signal: none is killed by one while it is still
        # importing.
        handlers = {number: signal.getsignal(number) for number in _BLOCKED}
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
            return started
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._logs.pump()
        processes = self._processes()
        codes = {worker.global_rank: processes[worker.local_rank].poll() for worker in worker_group.workers}
        action = self._supervision.observe(codes, time.time())
        running = [process.pid for process in processes.values() if process.returncode is None]
        if action is Action.STOP:
            number = self._supervision.signals[0] if self._supervision.signals else signal.SIGTERM
            for pid in running:
                os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)
        elif action is Action.KILL:
            for pid in running:
                _kill_group(pid)
        if action is not Action.FINISH:
            return RunResult(state=WorkerState.HEALTHY)
        for process in processes.values():
            _kill_group(process.pid)  # what a rank left behind: data loaders, compiler workers
        if running:
            raise _AttemptEndedError
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and not self._supervision.may_restart:
            raise _AttemptEndedError
        return result

    def _processes(self) -> dict[int, Any]:
        assert isinstance(self._pcontext, SubprocessContext)
        return {local_rank: handler.proc for local_rank, handler in self._pcontext.subprocess_handlers.items()}


def _kill_group(pid: int) -> None:
    """Kill a rank and everything it started; torch makes every rank the leader of a session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _log_to_file(path: Path) -> None:
    """Send torch elastic's own talk to a file: the user gets one message from us."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(handler)
    logger.propagate = False
