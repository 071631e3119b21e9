"""The agent's decisions, and the ranks' agreement, without processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from partool.plan.run import rank_log
from partool_runtime.agent.error_files import ErrorRecord, put_record, read_errors, write_error
from partool_runtime.agent.report import summarise
from partool_runtime.agent.run import _stop_signals, main
from partool_runtime.agent.standing import Standing
from partool_runtime.agent.supervision import FAILURE_GRACE_S, FINISH_GRACE_S, Reaction, Supervision
from partool_runtime.errors import ConfigurationError, Preempted, exit_code, lasting_refusals
from partool_runtime.stop import STOP_SIGNALS, StopRequest


@pytest.fixture
def watch() -> Supervision:
    return Supervision(shutdown_timeout_s=60)


def test_a_stop_is_told_once_and_enforced_in_time(watch: Supervision) -> None:
    assert watch.observe({0: None, 1: None}, 0) is Reaction.WAIT
    watch.signals.append(signal.SIGTERM)
    assert watch.observe({0: None, 1: None}, 10) is Reaction.STOP
    assert watch.observe({0: None, 1: None}, 11) is Reaction.WAIT
    watch.signals.append(signal.SIGTERM)  # Slurm repeats the signal; that does not shorten the time
    assert watch.observe({0: 75, 1: None}, 69.9) is Reaction.WAIT
    assert watch.observe({0: 75, 1: None}, 70) is Reaction.KILL
    assert "within 60 s" in watch.killed
    assert watch.observe({0: 75, 1: -9}, 71) is Reaction.FINISH
    assert watch.exit_code == 1
    assert not watch.may_restart


def test_a_stop_before_the_first_step_ends_the_ranks_at_once(watch: Supervision) -> None:
    assert watch.observe({0: None, 1: None}, 9, begun=False) is Reaction.WAIT
    watch.signals.append(signal.SIGTERM)
    assert watch.observe({0: None, 1: None}, 10, begun=False) is Reaction.KILL
    assert (watch.preempted, watch.failed) == (True, False)
    assert watch.observe({0: -9, 1: None}, 11, begun=True) is Reaction.KILL
    assert watch.observe({0: -9, 1: 1}, 12) is Reaction.FINISH
    assert (watch.exit_code, watch.may_restart) == (75, False)


def test_ranks_of_a_node_whose_peers_were_ended_so_follow_them(watch: Supervision) -> None:
    watch.stopped_elsewhere = watch.early_elsewhere = True
    assert watch.observe({0: None}, 10, begun=True) is Reaction.KILL
    assert watch.observe({0: -9}, 11) is Reaction.FINISH
    assert watch.exit_code == 75


def test_a_checkpoint_in_time_counts_although_ranks_linger(watch: Supervision) -> None:
    watch.signals.append(signal.SIGTERM)
    watch.observe({0: None, 1: None}, 0)
    assert watch.observe({0: 75, 1: None}, 61) is Reaction.KILL
    watch.observe({0: 75, 1: -9}, 62)
    assert watch.exit_code == 1
    watch.saved = True
    assert watch.exit_code == 75
    watch.observe({0: 1, 1: -9}, 63)
    assert watch.exit_code == 1


@pytest.mark.parametrize("order", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_interrupt_kills(watch: Supervision, order: tuple[signal.Signals, ...]) -> None:
    watch.signals += order
    assert watch.observe({0: None}, 0) is Reaction.KILL
    assert watch.killed == "interrupted a second time"


def test_a_preempted_rank_takes_the_others_along(watch: Supervision) -> None:
    assert watch.observe({0: 75, 1: None}, 5) is Reaction.STOP
    assert watch.observe({0: 75, 1: None}, 64.9) is Reaction.WAIT
    assert watch.observe({0: 75, 1: 75}, 65) is Reaction.FINISH
    assert watch.exit_code == 75
    assert not watch.may_restart


def test_a_rank_that_cannot_be_killed_is_given_up(watch: Supervision) -> None:
    watch.signals += [signal.SIGINT, signal.SIGINT]
    assert watch.observe({0: None, 1: -9}, 0) is Reaction.KILL
    assert watch.observe({0: None, 1: -9}, 29) is Reaction.KILL
    assert watch.observe({0: None, 1: -9}, 31) is Reaction.FINISH
    assert (watch.exit_code, watch.may_restart) == (1, False)


def test_a_failure_leaves_the_others_a_moment(watch: Supervision) -> None:
    watch.signals.append(signal.SIGTERM)
    watch.observe({0: None, 1: None}, 0)
    assert watch.observe({0: 1, 1: None}, 20) is Reaction.WAIT
    assert watch.observe({0: 1, 1: None}, 20 + FAILURE_GRACE_S) is Reaction.KILL


def test_after_the_first_finished_rank_the_others_have_a_grace_period(watch: Supervision) -> None:
    assert watch.observe({0: None, 1: None}, 1e6) is Reaction.WAIT
    assert watch.observe({0: 0, 1: None}, 1e6) is Reaction.WAIT
    assert watch.observe({0: 0, 1: None}, 1e6 + FINISH_GRACE_S - 0.1) is Reaction.WAIT
    assert watch.observe({0: 0, 1: None}, 1e6 + FINISH_GRACE_S) is Reaction.KILL
    assert watch.observe({0: 0, 1: -9}, 1e6 + FINISH_GRACE_S + 1) is Reaction.FINISH
    assert (watch.exit_code, watch.may_restart, watch.killed_ranks) == (1, True, [1])
    watch.complete = True  # the last step is saved
    assert (watch.exit_code, watch.may_restart) == (0, False)


def test_a_finished_run_that_is_asked_to_stop_is_done_if_its_last_step_is_saved(watch: Supervision) -> None:
    watch.observe({0: 0, 1: None}, 0)
    watch.signals.append(signal.SIGTERM)
    assert watch.observe({0: 0, 1: None}, 1) is Reaction.STOP
    assert watch.observe({0: 0, 1: None}, 61) is Reaction.KILL
    watch.observe({0: 0, 1: -9}, 62)
    assert watch.exit_code == 1
    watch.complete = True
    assert watch.exit_code == 0


def test_ranks_of_a_node_follow_those_of_another_that_have_finished(watch: Supervision) -> None:
    watch.finished_elsewhere = True
    assert watch.observe({0: None}, 5) is Reaction.WAIT
    assert watch.observe({0: None}, 5 + FINISH_GRACE_S) is Reaction.KILL


def test_a_saved_last_step_does_not_hide_a_failure(watch: Supervision) -> None:
    watch.complete = True
    watch.observe({0: 1, 1: None}, 0)
    assert watch.observe({0: 1, 1: None}, FAILURE_GRACE_S) is Reaction.KILL
    watch.observe({0: 1, 1: -9}, 4)
    assert watch.exit_code == 1


def test_other_nodes_have_a_moment_to_write_stacks_of_a_stall(watch: Supervision) -> None:
    watch.stalled, watch.standing_elsewhere = "rank 1 made no progress", Standing(2, 5, 0.0)
    assert watch.observe({0: None, 1: None}, 0) is Reaction.WAIT
    assert watch.observe({0: None, 1: None}, FAILURE_GRACE_S) is Reaction.KILL
    assert watch.killed == "rank 1 made no progress"


def test_a_stall_ends_the_ranks_and_may_be_restarted(watch: Supervision) -> None:
    watch.stalled = "rank 1 made no progress"
    assert watch.observe({0: None, 1: None}, 0) is Reaction.KILL
    assert watch.observe({0: -9, 1: -9}, 1) is Reaction.FINISH
    assert (watch.exit_code, watch.may_restart, watch.killed) == (1, True, "rank 1 made no progress")
    watch.begin_attempt()
    assert watch.observe({0: None, 1: None}, 2) is Reaction.WAIT


@pytest.mark.parametrize(
    ("codes", "wanted", "restart"),
    [
        ((0, 0), 0, False),
        ((75, 75), 75, False),
        ((0, 75), 75, False),
        ((1, 75), 1, False),
        ((1, -9), 1, True),
        ((-11, 0), 1, True),
        ((78, -9), 78, False),
        ((1, 78), 78, False),
        ((42, 1), 1, True),
    ],
)
def test_exit_codes(watch: Supervision, codes: tuple[int, ...], wanted: int, restart: bool) -> None:
    assert watch.observe(dict(enumerate(codes)), 0) is Reaction.FINISH
    assert (watch.exit_code, watch.may_restart) == (wanted, restart)


@pytest.mark.parametrize("action", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_hangup_that_nohup_ignores_stays_ignored(action: signal.Handlers) -> None:
    """A run that was started to survive the terminal's end goes on; without ``nohup`` it saves and stops."""
    received: list[signal.Signals] = []
    before = signal.signal(signal.SIGHUP, action)
    try:
        with _stop_signals(received):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is action
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received == [signal.SIGHUP] * (action is signal.SIG_DFL)


def test_a_new_attempt_forgets_ranks_but_not_requests(watch: Supervision) -> None:
    watch.observe({0: 1, 1: None}, 0)
    watch.observe({0: 1, 1: None}, FAILURE_GRACE_S)
    watch.begin_attempt()
    assert watch.killed == ""
    assert watch.observe({0: None, 1: None}, 100) is Reaction.WAIT
    watch.signals.append(signal.SIGUSR2)
    watch.begin_attempt()
    assert watch.observe({0: None, 1: None}, 101) is Reaction.STOP


def test_the_first_failure_is_found_and_recorded(watch: Supervision, tmp_path: Path) -> None:
    def failed(*records: tuple[int, float]) -> str:
        """Return the reason of the failure beside records (rank, time) of errors."""
        shutil.rmtree(tmp_path / "errors", ignore_errors=True)
        for rank, time_s in records:
            put_record(tmp_path, ErrorRecord(rank, 1, time_s, "E", "m", "t", 1))
        first, second = (summarise(tmp_path, 1, watch) for _ in range(2))  # the first call makes records
        assert (first.reason, first.text) == (second.reason, second.text)
        return first.reason

    log = rank_log(tmp_path, 1, 1, "stderr")
    log.parent.mkdir(parents=True)
    log.write_text("step 7\nlast words\n")
    watch.observe({0: None, 1: None, 2: None}, 10.0)
    watch.observe({0: 1, 1: -9, 2: 1}, 10.1)
    killed = "killed by SIGKILL (often the kernel's out-of-memory killer)"
    assert failed((0, 10.05), (2, 10.02)) == f"rank 1: {killed}"  # the others lost their peer
    record = read_errors(tmp_path, 1)[1]
    assert (record.time, record.type, record.message, record.traceback) == (10.0, "", killed, "step 7\nlast words")
    assert failed((0, 10.05), (2, 9.9)) == "rank 2: E: m"
    watch.killed = "another rank had failed"
    assert failed((0, 10.05)) == "rank 2: ended with exit code 1 and no error record"  # the agent killed rank 1
    assert set(read_errors(tmp_path, 1)) == {0, 2}
    watch.observe({0: 75, 1: -9}, 11)
    assert failed() == "rank 1 killed: another rank had failed"


def test_error_records(tmp_path: Path) -> None:
    try:
        raise ValueError("nope")
    except ValueError as error:
        write_error(tmp_path, 3, 1, error)
    assert read_errors(tmp_path, 2) == {}
    record = read_errors(tmp_path, 1)[3]
    assert (record.type, record.message, record.exit_code) == ("ValueError", "nope", 1)
    assert 'raise ValueError("nope")' in record.traceback
    write_error(tmp_path, 3, 2, ConfigurationError("PT601", "bad", "better"))
    record = read_errors(tmp_path, 2)[3]
    assert (record.code, record.message, record.help, record.exit_code) == ("PT601", "bad", "better", 78)
    assert read_errors(tmp_path, 1) == {}


def test_exit_code_of_errors() -> None:
    errors = [Preempted(), ConfigurationError("PT601", "x"), ValueError(), KeyboardInterrupt()]
    assert [exit_code(error) for error in errors] == [75, 78, 1, 1]
    assert str(ConfigurationError("PT601", "x", "y")) == "PT601: x\n  help: y"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            PermissionError(13, "Permission denied", "/runs/a/logs"),
            "PT512",
            "/runs/a/logs cannot be written: Permission",
        ),
        (OSError(30, "Read-only file system", "/runs"), "PT512", "/runs cannot be written: Read-only file system"),
        (
            PermissionError(13, "Permission denied", "/opt/python"),
            "PT507",
            "cannot be started: /opt/python: Permission",
        ),
        (
            PermissionError(1, "Operation not permitted"),
            "PT507",
            "cannot be started: [Errno 1] Operation not permitted",
        ),
        (OSError(28, "No space left on device", "/runs/a/logs"), None, "No space left"),
    ],
)
def test_refusals_that_last_are_configuration_errors(error: OSError, code: str | None, message: str) -> None:
    with (
        pytest.raises((ConfigurationError, OSError), match=re.escape(message)) as caught,
        lasting_refusals(Path("/runs/a")),
    ):
        raise error
    assert getattr(caught.value, "code", None) == code


def test_an_agent_without_a_folder_is_not_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    log = tmp_path / "termination"
    words = ["plan.json", "--run-dir", str(tmp_path / "file" / "run"), "--termination-log", str(log)]
    assert main(words) == 78
    assert log.read_text().startswith(f"partool: PT512: {tmp_path}/file/run cannot be written: Not a directory\n")
    assert capsys.readouterr().err == log.read_text() + "\n"


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    request = StopRequest()
    request.install()
    yield request
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", sorted(STOP_SIGNALS))
def test_signals_request_a_stop(stop: StopRequest, number: signal.Signals) -> None:
    assert not stop.agree(1)
    os.kill(os.getpid(), number)
    assert stop.requested
    assert stop.reason == number.name
    assert stop.agree(2)
    assert stop.agreed_step == 2


def test_blocked_signals_are_not_lost() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        # Sent to this thread: other threads of the test process do not block the signal, which would end the process.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        request = StopRequest()
        request.install()
        assert request.reason == "SIGUSR2"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDING = """
import builtins, sys, time
from partool_runtime.stop import StopRequest

class Slow:
    def __del__(self, sleep=time.sleep):  # runs after the interpreter has given signals their default action back
        sleep(0.6)

stop = StopRequest()
stop.install()
stop.retire()
builtins.slow = Slow()
print("ending", flush=True)
sys.exit(75)
"""


def test_a_rank_that_ends_is_not_killed_by_a_late_signal() -> None:
    rank = subprocess.Popen([sys.executable, "-c", _ENDING], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    with rank.stdout:
        rank.stdout.readline()
    time.sleep(0.25)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(timeout=30) == 75


def test_steps_carry_the_request_of_any_rank(stop: StopRequest) -> None:
    """Only the first step asks by a collective of its own; later ones read the sums of all ranks' flags."""
    asked: list[int] = []
    stop.use(lambda value: asked.append(value) or value)  # type: ignore[func-returns-value]
    assert stop.flags() == [0.0] * len(STOP_SIGNALS)
    assert not stop.heard(stop.flags(), 1)
    assert asked == [0]
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not stop.heard([0.0] * len(STOP_SIGNALS), 2), "the step's sums were made before the signal"
    assert sum(stop.flags()) == 1.0
    assert stop.heard(stop.flags(), 3)
    assert (asked, stop.reason, stop.agreed_step) == ([0], "SIGUSR2", 3)
    other = StopRequest()
    other.heard(other.flags(), 1)
    both = [float(number in (signal.SIGINT, signal.SIGTERM)) for number in sorted(STOP_SIGNALS)]
    assert other.heard(both, 2)
    assert other.reason == "SIGTERM"


def test_ranks_agree_and_none_forgets(stop: StopRequest) -> None:
    """All ranks take the all-reduce's result; a signal during the all-reduce counts at the next step."""

    def reduce(value: int) -> int:
        assert value == 0
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    stop.use(reduce)
    assert not stop.agree(1)
    assert stop.requested
    stop.use(lambda value: value)
    assert stop.agree(2)
    other = StopRequest()
    other.use(lambda value: max(value, int(signal.SIGUSR2)))
    assert other.agree(7)
    assert (other.reason, other.agreed_step) == ("SIGUSR2", 7)


_CHILD = """
import signal, sys, threading, time
sys.platform = sys.argv[2]
if sys.platform == "linux":
    threading.Thread.start = lambda thread: None  # the kernel alone
from partool_runtime.agent.lifeline import end_with_parent
end_with_parent(int(sys.argv[1]), signal.SIGKILL)
print("alive", flush=True)
time.sleep(60)
"""
_PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]])
time.sleep(60)
"""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("platform", ["linux", "other"])
def test_children_end_with_their_parent(platform: str) -> None:
    """The kernel ends them on Linux, a check of the parent's id elsewhere; the pipe closes when the child is gone."""
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, _CHILD, platform], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"alive\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == b""
    parent.stdout.close()


def test_a_parent_that_is_gone_already() -> None:
    child = subprocess.run([sys.executable, "-c", _CHILD, "1", "linux"], capture_output=True, timeout=20)
    assert child.returncode == -signal.SIGKILL
    assert child.stdout == b""
