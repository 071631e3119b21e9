"""Runs the ranks as processes with torch elastic's local agent."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # documented, but not typed as such
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from partool.plan.run import LOGS, rank_command, rank_environment
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.strategies.targets import SCHEDULERS
from partool_runtime.agent import numa
from partool_runtime.agent.clock import AwakeClock
from partool_runtime.agent.interfaces import interface_towards, resolves_to_network
from partool_runtime.agent.options import AgentOptions, AgentPlace
from partool_runtime.agent.rank_logs import RankLogs
from partool_runtime.agent.stops import waiting
from partool_runtime.agent.supervision import Reaction, Supervision
from partool_runtime.agent.watchdog import STOPPED
from partool_runtime.agent.watching import RankWatch
from partool_runtime.agent.wire import listen_at
from partool_runtime.errors import lasting_refusals
from partool_runtime.private import keep_compiled_code_private
from partool_runtime.stop import STOP_SIGNALS

_LOOPBACK = "127.0.0.1"
_LEFTOVER = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"}
    | {"ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}
)
"""Environment variables that are removed from the agent, because torch sets them for the ranks."""
_BLOCKED = STOP_SIGNALS | {signal.SIGHUP}


class _AttemptEndedError(Exception):
    """The ranks have ended and are not restarted."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions that the agent calls while it watches its ranks."""

    next_attempt: Callable[[], int]
    """Called before every start; returns the attempt's number."""
    restart_helps: Callable[[], bool]
    """Called once after each failed attempt; returns False if another attempt would fail in the same way."""
    look: Callable[[], None]
    """Called several times a second, before the ranks are checked."""
    saved_step: Callable[[], int]
    """Returns the step of the newest checkpoint."""
    last_step: int
    """Number of steps of the whole training."""
    stalled: Callable[[str], None] = lambda reason: None
    """Called when a rank of this node makes no progress, with the reason for which the ranks are ended."""


def run_ranks(
    plan: Plan,
    options: AgentOptions,
    *,
    worker: str,
    supervision: Supervision,
    hooks: Hooks,
    meeting: tuple[str, tuple[str, int]] = ("", ("", 0)),
) -> None:
    """Start this node's ranks, restart them after failures within the plan's limit, and return when they have ended.

    Afterwards ``supervision`` holds the last attempt's exit codes. In a run on several nodes ``meeting`` holds the
    addresses of node 0 and of the ranks' store; this function then restarts no ranks, because a restart needs all
    nodes. Raises ConfigurationError if the operating system refuses to start the ranks.
    """
    place = options.place
    with lasting_refusals(options.run_dir):
        _log_to_file(options.run_dir / LOGS / ("agent.log" if place.node_rank == 0 else f"agent-{place.node_rank}.log"))
    _set_environment(plan, place, meeting[0])
    arguments = rank_command(options.plan, options.run_dir, resume=options.resume, module=worker)
    in_place = not place.several and plan.launch.target not in SCHEDULERS
    where = f" on node {place.node_rank} ({socket.gethostname()})" if place.several else ""
    watch = RankWatch(plan, options.run_dir, where=where, notes=place.node_rank == 0)
    logs = RankLogs(options.run_dir, options.echo, _bound(plan), watch.pulses)
    spec = WorkerSpec(
        role=plan.job,
        local_world_size=plan.devices.per_node,
        rdzv_handler=_Given(place, options.run_dir.name, meeting[1]),
        entrypoint=arguments[0],
        args=tuple(arguments[1:]),
        max_restarts=plan.launch.restarts if in_place else 0,
        local_addr=_LOOPBACK,
    )
    try:
        _Agent(spec, logs, supervision, hooks, run_dir=options.run_dir, several=place.several, watch=watch).run()
    except _AttemptEndedError:
        pass
    finally:
        logs.close()
        watch.close()
        spec.rdzv_handler.shutdown()


def _set_environment(plan: Plan, place: AgentPlace, head: str) -> None:
    """Put the ranks' variables into this process's environment, which they inherit."""
    for name in [name for name in os.environ if name in _LEFTOVER or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks are numbered by arithmetic, not through a store
    os.environ.update(rank_environment(plan))
    keep_compiled_code_private(os.environ)
    if not place.several or "GLOO_SOCKET_IFNAME" in os.environ or resolves_to_network(socket.gethostname()):
        return
    # gloo would use the address that the host's name resolves to, which other nodes may not reach
    if interface := interface_towards(head or place.host):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _bound(plan: Plan) -> numa.Bindings | None:
    """Return the cores and memory to which each rank is bound; the environment must already hold the device masks."""
    if plan.launch.numa == "none":
        return None
    bindings = numa.bindings(plan.devices.per_node, plan.devices.backend, plan.devices.accelerator)
    if bindings.note:
        say(f"partool: note: {bindings.note}", err=True)
    return bindings


class RanksStore:
    """The store at which the ranks meet in an attempt; the agent of node 0 hosts it.

    The kernel chooses the store's port. The store's socket stays open until the ranks connect, so that no other process
    can take the port.
    """

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def open(self, address: str) -> int:
        """Host a new store in place of the previous store, and return the new store's port.

        ``address`` is an address of this machine; an empty text means all addresses of this machine.
        """
        listener = listen_at(address, 0)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(  # TCPStore closes the socket
            address or _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return port


class _Given(RendezvousHandler):
    """A rendezvous that is already complete, because the agents know their node numbers.

    The ranks use a store that an agent hosts anew for every attempt: in a store that outlives an attempt, new ranks
    find the previous ranks' addresses and hang (pytorch#135712).
    """

    def __init__(self, place: AgentPlace, run_id: str, store: tuple[str, int]) -> None:
        self._place = place
        self._run_id = run_id
        self._agents_store = store
        self._store = RanksStore()

    @property
    def use_agent_store(self) -> bool:
        """Return True: the ranks use the store that an agent hosts."""
        return True

    def get_backend(self) -> str:
        """Return a name for torch's logs."""
        return "partool"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's number, the number of nodes and the location of the ranks' store."""
        address, port = self._agents_store if self._place.several else (_LOOPBACK, self._store.open(_LOOPBACK))
        store = RendezvousStoreInfo(address, port)
        return RendezvousInfo(HashStore(), self._place.node_rank, self._place.nodes, store)

    def is_closed(self) -> bool:
        """Return False: this rendezvous is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no other node can join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the number of nodes is fixed."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: there is nothing to shut down."""
        return True


class _Agent(LocalElasticAgent):
    """Torch's agent, in which partool decides which ranks to stop or kill and when to start another attempt."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: RankLogs,
        supervision: Supervision,
        hooks: Hooks,
        *,
        run_dir: Path,
        several: bool,
        watch: RankWatch,
    ) -> None:
        super().__init__(spec, logs)
        self._run_dir = run_dir
        self._logs = logs
        self._supervision = supervision
        self._hooks = hooks
        self._several = several
        self._watch = watch
        self._clock = AwakeClock()
        self._saved_step: int | None = None
        """Step of the checkpoint that was the newest when the ranks were asked to stop."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._supervision.begin_attempt()
        with lasting_refusals(self._run_dir):
            self._logs.attempt = self._hooks.next_attempt()
        self._watch.begin_attempt(self._logs.attempt)
        # torch installs signal handlers when it starts processes, so signals wait until partool's handlers are back.
        # The ranks inherit the block and lift it when they can handle signals, so that no signal kills a rank that is
        # still importing.
        handlers = {number: signal.getsignal(number) for number in _BLOCKED}
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            with lasting_refusals(self._run_dir):  # a refusal while ranks run may be temporary
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
        supervision = self._supervision
        alive = {
            w.global_rank: processes[w.local_rank].pid for w in worker_group.workers if codes[w.global_rank] is None
        }
        self._look_at_progress(alive)
        self._hooks.look()
        if supervision.stalled_elsewhere:
            self._watch.write_stacks(alive)  # before the other node ends its ranks, and these fail with them
        begun = not supervision.asked or self._logs.begun
        action = supervision.observe(codes, self._clock.now(), begun=begun, at=time.time())
        running = [process.pid for process in processes.values() if process.returncode is None]
        if action is Reaction.STOP:
            self._ask_to_stop(running)
        elif action is Reaction.KILL:
            if supervision.stalled or supervision.stalled_elsewhere:
                self._watch.write_stacks(alive)
            for pid in running:
                _kill_group(pid)
        if action is not Reaction.FINISH:
            return RunResult(state=WorkerState.HEALTHY)
        if supervision.killed and self._saved_step is not None:
            saved_step = self._hooks.saved_step()
            supervision.saved, supervision.resumable = saved_step > self._saved_step, saved_step > 0
        if supervision.killed:
            supervision.complete = self._hooks.saved_step() >= self._hooks.last_step
        for process in processes.values():
            _kill_group(process.pid)  # processes that a rank left behind: data loaders, compiler workers
        if running or self._several:
            raise _AttemptEndedError
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and not (self._supervision.may_restart and self._hooks.restart_helps()):
            raise _AttemptEndedError
        return result

    def _ask_to_stop(self, running: Sequence[int]) -> None:
        """Send the ranks' processes the request to stop, and say how long the agent waits for their checkpoint."""
        supervision = self._supervision
        self._saved_step = self._hooks.saved_step()
        if supervision.signals:
            with suppress(OSError):  # the terminal may have been closed
                say(f"partool: {waiting(supervision.signals, supervision.shutdown_timeout_s)}", err=True)
        number = supervision.signals[0] if supervision.signals else signal.SIGTERM
        for pid in running:
            os.kill(pid, signal.SIGTERM if number == signal.SIGHUP else number)

    def _look_at_progress(self, alive: Mapping[int, int]) -> None:
        """Note in ``supervision`` if a rank makes no progress, unless the ranks are ending anyway."""
        supervision = self._supervision
        stall = self._watch.look(alive, self._clock.now())
        supervision.standing, supervision.patient = self._watch.standing, self._watch.patient
        ending = supervision.asked or supervision.failed or supervision.finishing or supervision.trouble_elsewhere
        waiting = stall is not None and stall.state != STOPPED and supervision.patient_elsewhere
        if stall is not None and not waiting and not ending and not supervision.stalled:
            supervision.stalled, supervision.stalled_elsewhere = self._watch.reason(
                stall, supervision.standing_elsewhere
            )
            self._hooks.stalled(supervision.stalled)
            supervision.stalled += f"; stacks of all ranks: {self._watch.write_stacks(alive)}"

    def _processes(self) -> dict[int, Any]:
        assert isinstance(self._pcontext, SubprocessContext)
        return {local_rank: handler.proc for local_rank, handler in self._pcontext.subprocess_handlers.items()}


def _kill_group(pid: int) -> None:
    """Kill a rank and everything it started; torch makes every rank the leader of a session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _LogFile(logging.FileHandler):
    """A log handler that ignores errors, so that a full disk does not cause printed tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drop the record."""


def _log_to_file(path: Path) -> None:
    """Send torch elastic's log to a file, because the user gets a single message from the agent instead."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(handler)
    logger.propagate = False
