"""Starts the ranks of a plan on this node: ``python -m partool_runtime.agent PLAN --run-dir DIR [--resume]``.

On several nodes, one agent runs on each node, with ``--nodes N --node-rank K --rendezvous HOST:PORT``; all end with the
same code. Exit codes: 0 done; 75 every rank stopped on request after a checkpoint; 78 configuration error, never retry;
1 anything else. SIGTERM, SIGUSR2, SIGHUP and the first SIGINT ask the ranks to checkpoint and stop; a second SIGINT
kills the ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from partool.plan.outline import outline
from partool.plan.run import KEY_VARIABLE, agent_log, lock_file
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.spec.launch import SHORTEST_WINDOW_S
from partool.strategies.targets import HERE
from partool_runtime.agent import report
from partool_runtime.agent.failures import FailureLog, signature
from partool_runtime.agent.lifeline import end_with_parent
from partool_runtime.agent.node_messages import Verdict, WaitTimes
from partool_runtime.agent.notify import Notifier
from partool_runtime.agent.options import AgentOptions, check_plan, parse
from partool_runtime.agent.secrets import read_secrets
from partool_runtime.agent.status import StatusKeeper
from partool_runtime.agent.stops import left_without_checkpoint, losses
from partool_runtime.agent.supervision import Supervision
from partool_runtime.errors import (
    EXIT_CONFIGURATION,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    FULL,
    ConfigurationError,
    Preempted,
    lasting_refusals,
)
from partool_runtime.plan_file import load_plan
from partool_runtime.stop import STOP_SIGNALS


class Restarts:
    """Counts the attempts of one agent, and reports the reason of each attempt except the first."""

    def __init__(self, plan: Plan, run_dir: Path, keeper: StatusKeeper, failures: FailureLog) -> None:
        self._run_dir, self._keeper, self._failures = run_dir, keeper, failures
        self._launch = plan.launch
        self._last = 0
        self.reason = ""
        """Reason of the previous attempt's failure, in one line."""

    def next_attempt(self) -> int:
        """Note that the ranks are being started; returns the number of this attempt."""
        attempt = self._keeper.next_attempt()
        if self._last:
            where = f"goes on from step {step}" if (step := self._failures.saved_step) else "begins anew"
            self._say(attempt, f"{self.reason}; attempt {attempt} of {self._last} {where}")
        else:
            self._last = attempt + self._launch.restarts
        return attempt

    def _say(self, attempt: int, what: str) -> None:
        """Write a line to standard error and to the log of the next attempt."""
        with contextlib.suppress(OSError):  # the terminal may have been closed
            say(f"partool: {what}", err=True)
        file = agent_log(self._run_dir, attempt)
        with contextlib.suppress(OSError):  # training can go on without this log
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"partool: {what}\n", encoding="utf-8")

    def help(self, *, asked: bool = False) -> str:
        """Return how to continue a run that failed or was ``asked`` to stop; empty if a scheduler restarts runs."""
        if self._launch.target != HERE:
            return ""
        step, ways = self._failures.saved_step, []
        if step:
            ways.append(f"partool launch --resume {self._run_dir.name} goes on from step {step}")
        elif asked:
            ways.append("there is no checkpoint: a new start begins anew")
        if not self._launch.restarts and not asked:
            ways.append("with launch: {restarts: 1} the agent starts the ranks again by itself")
        return f"  help: {'; '.join(ways)}" if ways else ""


_TERMINATION_BYTES = 4000
"""Maximum bytes of a termination message; Kubernetes keeps 4096."""
_LOCK_BEYOND_WINDOW_S = 90.0
"""Seconds to wait for the run's lock under a scheduler, beyond the time that the plan gives a stop. The previous
attempt's agent may still be ending, or its node is lost and a file server keeps the agent's lock for a while (NFSv4: a
lease of 90 s)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent and return its exit code."""
    try:
        options = parse(argv)
    except ConfigurationError as error:
        say(f"partool: {error}", err=True)
        return EXIT_CONFIGURATION
    return run_agent(options)


def run_agent(options: AgentOptions, *, worker: str = "partool_runtime.worker", timing: WaitTimes | None = None) -> int:
    """Start a rank per device of a node of the plan, as ``python -m worker``, and watch the ranks until they end.

    Returns the exit code; messages go to standard error, the state to ``status.json``. Call it from the main
    thread, once per process.
    """
    signals: list[signal.Signals] = []
    with _stop_signals(signals):
        if launcher := os.environ.pop("PARTOOL_LAUNCHER_PID", None):
            end_with_parent(int(launcher), signal.SIGTERM)
        options = replace(options, plan=options.plan.resolve(), run_dir=options.run_dir.resolve())
        try:
            with contextlib.ExitStack() as locks:
                with lasting_refusals(options.run_dir):
                    locks.enter_context(_lock(options, signals))
                verdict = _run(options, worker, timing or WaitTimes(), signals)
        except ConfigurationError as error:
            verdict = Verdict(EXIT_CONFIGURATION, str(error).splitlines()[0], f"partool: {error}")
        except Preempted as error:
            verdict = Verdict(EXIT_PREEMPTED, str(error), f"partool: {error}")
        except OSError as error:
            if error.errno not in FULL:
                raise
            reason = f"{error.filename or options.run_dir} cannot be written: {error.strerror}"
            verdict = Verdict(EXIT_FAILED, reason, f"partool: {reason}")
        _tell(verdict, options)
        return verdict.code


def _run(options: AgentOptions, worker: str, timing: WaitTimes, signals: list[signal.Signals]) -> Verdict:
    keeper = StatusKeeper(options.run_dir) if options.place.node_rank == 0 else None
    notifier = Notifier(options.plan, options.run_dir)
    try:
        with lasting_refusals(options.run_dir):  # a refusal while ranks run may be temporary
            plan = _prepare(options)
        window_s = plan.launch.window_s if isinstance(plan, Plan) else 0
        supervision = Supervision(window_s, signals=signals, finish_grace_s=timing.finish_s)
        if options.place.several:
            with _loading_torch():
                from partool_runtime.agent.together import Together

            return Together(options, timing, worker, supervision, keeper, notifier).run(plan)
        os.environ.pop(KEY_VARIABLE, None)  # a single agent needs no key, and ranks must not get the key
        assert keeper is not None
        return _run_alone(plan, options, worker, supervision, keeper, notifier)
    except ConfigurationError as error:
        if keeper is not None:
            keeper.end(EXIT_CONFIGURATION, str(error).splitlines()[0])
        raise
    except BaseException as error:
        if keeper is not None:
            keeper.end(1, f"{type(error).__name__} in the agent: {error}")
        raise
    finally:
        if keeper is not None:
            notifier.ended(keeper.status)


@contextmanager
def _loading_torch() -> Iterator[None]:
    """Block stop signals while torch is loaded, and turn off messages of torch's C++ parts about lost connections.

    Threads that libraries start when loaded inherit the block. Otherwise a signal that the main thread blocks
    later, while it starts ranks, would be delivered to one of these threads.
    """
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if quiet:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # torch reads this variable once, when it is loaded
    blocked = STOP_SIGNALS | {signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if quiet:
            del os.environ["TORCH_CPP_LOG_LEVEL"]


def _prepare(options: AgentOptions) -> Plan | ConfigurationError:
    """Read and check the plan and put its secrets into the environment.

    On one node an error is raised. In a run on several nodes the error is returned, so that the other nodes can be
    informed.
    """
    try:
        plan = load_plan(options.plan)
        check_plan(plan, options.place, options.plan_hash)
        os.environ.update(read_secrets(plan.launch))
        return plan
    except ConfigurationError as error:
        if not options.place.several:
            raise
        return error


def _run_alone(  # noqa: PLR0917 - the parts of an agent
    plan: Plan | ConfigurationError,
    options: AgentOptions,
    worker: str,
    supervision: Supervision,
    keeper: StatusKeeper,
    notifier: Notifier,
) -> Verdict:
    """Run a plan for one node, and return the result."""
    assert isinstance(plan, Plan)
    run_dir, launch = options.run_dir, plan.launch
    failures = FailureLog(run_dir, plan)
    restarts = Restarts(plan, run_dir, keeper, failures)

    def equal_failures() -> int:
        summary = report.summarise(run_dir, keeper.status.attempt, supervision)
        restarts.reason = summary.short
        return failures.note(keeper.status.attempt, signature(summary.what or summary.reason))

    # torch is imported only now: a bad plan is reported without waiting a second for it
    with _loading_torch():
        from partool_runtime.agent.elastic import Hooks, run_ranks

    def saved() -> int:
        return failures.saved_step

    hooks = Hooks(
        restarts.next_attempt,
        lambda: equal_failures() < launch.same_failure,
        lambda: None,
        saved,
        plan.training.steps,
        lambda reason: notifier.stalled(keeper.status, reason),
    )
    run_ranks(plan, options, worker=worker, supervision=supervision, hooks=hooks)
    summary = report.summarise(run_dir, keeper.status.attempt, supervision)
    code, reason, text = supervision.exit_code, summary.reason, summary.text
    # A failure of a run that the user asked to stop is not counted.
    if code == 1 and not supervision.asked and (count := equal_failures()) >= launch.same_failure:
        code, reason = EXIT_CONFIGURATION, report.repeated(count, reason)
        text += f"\npartool: {reason}"
    elif left_without_checkpoint(supervision):
        text += "\n" + losses(failures, target=launch.target, run_dir=run_dir, since=keeper.status.started)
    elif code == 1 and (help := restarts.help(asked=supervision.asked)):
        text += f"\n{help}"
    keeper.end(code, reason or (failures.ended_early if code == EXIT_DONE else ""))
    return Verdict(code, reason, text)


def _tell(verdict: Verdict, options: AgentOptions) -> None:
    """Report how the run ended, on standard error and where Kubernetes reads it."""
    place = options.place
    here = place.node_rank in (0, verdict.node)  # the other nodes print one line
    text = verdict.text if here else verdict.text.partition("\n")[0]
    with contextlib.suppress(OSError):  # the terminal may have been closed; status and errors are in files
        if text:
            say(text, err=True)
    if options.termination_log is not None and verdict.code != EXIT_DONE:
        with contextlib.suppress(OSError):
            summary = report.shortened(verdict.text or verdict.reason, _TERMINATION_BYTES)
            options.termination_log.write_text(summary, encoding="utf-8")


@contextmanager
def _stop_signals(received: list[signal.Signals]) -> Iterator[None]:
    """Collect stop signals in ``received``, and lift the block that a launcher may have set."""

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    numbers = [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # SIGHUP is ignored under nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _window_s(plan: Path) -> int:
    """Return the time that a plan gives a stop; the shortest if the file cannot be read, which is reported later."""
    try:
        return outline(plan).launch.window_s
    except (OSError, ValueError):
        return SHORTEST_WINDOW_S


@contextmanager
def _lock(options: AgentOptions, signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Create the run's folder and lock it for this process; the kernel releases the lock at any end of the process.

    The agent of an attempt before may still be ending its ranks, so that this one waits for it, if a scheduler has
    started it. Raises Preempted if ``signals`` gets a stop signal meanwhile.
    """
    options.run_dir.mkdir(parents=True, exist_ok=True)
    run_dir, rendered = options.run_dir, options.place.several or options.plan_hash is not None
    give_up = time.monotonic() + (_window_s(options.plan) + _LOCK_BEYOND_WINDOW_S if rendered else 0.0)
    with (run_dir / lock_file(options.place.node_rank)).open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    message = f"another agent is at work in {run_dir}"
                    raise ConfigurationError("PT504", message, "partool status shows it") from None
                if signals:
                    reason = f"{signals[0].name} while the agent waited for another one at work in {run_dir}"
                    raise Preempted(reason) from None
                time.sleep(0.2)
            except OSError as error:  # a cluster's file system mounted without locks: schedulers start a run once
                say(f"partool: {run_dir} cannot be locked: {error.strerror}", err=True)
                break
        yield
