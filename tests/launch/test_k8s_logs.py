"""Output of several pods merged: in order, by rank, and followed over drops, restarts and lost connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from k8s_case import Case, case, condition, plan_of

from partool.launch.k8s import client as k8s_client
from partool.launch.k8s import logs as k8s_logs
from partool.launch.k8s import streams as k8s_streams
from partool.launch.store import Run
from partool.launch.target import LaunchError, LogQuery, NoLogsError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(k8s_client, "_PAUSES_S", (0.02, 0.05, 0.1))
    monkeypatch.setattr(k8s_streams, "PAUSE_S", 0.02)
    with case(tmp_path, custom=False) as found:
        yield found


@pytest.fixture
def run(here: Case) -> Run:
    return here.submit(plan_of(kind="job"))


def texts(here: Case, run: Run, **query: Any) -> list[str]:
    return [line.text.decode().rstrip("\n") for line in here.target.logs(run, LogQuery(**query))]


def second(number: float) -> str:
    return f"2026-11-21T10:00:{number:012.9f}Z"


class Following:
    """Follows a run in a separate thread."""

    def __init__(self, here: Case, run: Run, **query: Any) -> None:
        self.lines: list[tuple[int | None, str]] = []
        self._logs = here.target.logs(run, LogQuery(follow=True, **query))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._logs:
            self.lines.append((line.rank, line.text.decode().rstrip("\n")))

    def until(self, met: Callable[[list[str]], bool]) -> None:
        """Wait until the received texts meet a condition."""
        end = time.monotonic() + 20
        while not met([text for _, text in self.lines]):
            assert time.monotonic() < end, self.lines
            time.sleep(0.01)

    def end(self) -> list[str]:
        """Wait for the end; returns all texts."""
        self._thread.join(25)
        assert not self._thread.is_alive(), self.lines
        return [text for _, text in self.lines]


def finish(here: Case, run: Run, *pods: str, code: int = 0) -> None:
    for pod in pods:
        here.end_pod(pod, code)
    kind = "Failed" if code else "Complete"
    here.cluster.set_status("jobs", run.id, conditions=[condition(kind, "x")])


def test_nodes_are_merged_by_time_and_ranks_are_told_apart(here: Case, run: Run) -> None:
    first, other = here.pod(run, 0), here.pod(run, 1)
    here.cluster.write(first, "[0] a", at=second(1))
    here.cluster.write(first, "[1] c", at=second(3))
    here.cluster.write(other, "[2] b", at=second(2))
    # the same time in another zone, with fewer decimals, as some container runtimes write it
    here.cluster.write(other, "[3] d", at="2026-11-21T12:00:03.5+02:00")
    here.cluster.write(other, "agent: nodes meet", at=second(4))
    lines = list(here.target.logs(run, LogQuery()))
    assert [(line.rank, line.text) for line in lines] == [
        (0, b"a\n"),
        (2, b"b\n"),
        (1, b"c\n"),
        (3, b"d\n"),
        (None, b"agent: nodes meet\n"),
    ]


def test_one_rank_asks_only_the_node_that_it_is_on(here: Case, run: Run) -> None:
    first, other = here.pod(run, 0), here.pod(run, 1)
    here.cluster.write(first, "[1] mine not", "[11] nor this")
    here.cluster.write(other, "[2] no", "[3] yes", "plain")
    assert texts(here, run, rank=3) == ["yes"]
    assert not any(f"{first}/log" in path for _, path, _ in here.cluster.requests)
    with pytest.raises(NoLogsError, match="it has 4 ranks"):
        texts(here, run, rank=4)


def test_without_pods_it_says_so(here: Case, run: Run) -> None:
    with pytest.raises(NoLogsError, match="its pods have not started, or are gone"):
        texts(here, run)
    here.cluster.write(here.pod(run, 0), "[0] x")
    with pytest.raises(NoLogsError, match=r"no logs of attempt 2 .* there is attempt 1"):
        texts(here, run, attempt=2)


def test_attempts_are_told_apart(here: Case, run: Run) -> None:
    for attempt in (0, 1):
        here.cluster.write(here.pod(run, 0, attempt=attempt), f"[0] attempt {attempt + 1}")
    assert texts(here, run) == ["attempt 2"]
    assert texts(here, run, attempt=1) == ["attempt 1"]


def test_the_life_before_a_restart_in_place_is_an_attempt(here: Case, run: Run) -> None:
    ended = {"terminated": {"exitCode": 1, "finishedAt": second(1)[:19] + "Z"}}
    container = {"name": "node", "restartCount": 1, "state": {"running": {}}, "lastState": ended}
    pod = here.pod(run, 0, containerStatuses=[container])
    here.cluster.write(pod, "[0] before", previous=True)
    here.cluster.write(pod, "[0] after")
    assert texts(here, run) == ["after"]
    assert texts(here, run, attempt=1) == ["before"]


def test_logs_that_may_not_be_read_are_an_error(here: Case, run: Run) -> None:
    here.cluster.write(here.pod(run, 0), "[0] x")
    here.cluster.forbidden.add(("get", "pods/log"))
    with pytest.raises(LaunchError, match="you may not get pods/log in namespace default"):
        texts(here, run)


def test_a_drop_in_the_middle_of_a_log_loses_and_repeats_nothing(here: Case, run: Run) -> None:
    wanted = [f"line {number}" for number in range(40)]
    pod = here.pod(run, 0)
    # ten lines per time stamp, all of them within one second
    for number, line in enumerate(wanted):
        here.cluster.write(pod, f"[0] {line}", at=second(5 + number // 10 / 10))
    for after in (7, 15, 22):
        here.cluster.trouble("GET", "/log", "cut", amount=after)
    assert texts(here, run) == wanted
    assert sum("/log" in path for _, path, _ in here.cluster.requests) == 4


def test_following_begins_in_order_and_goes_on_to_the_end(here: Case, run: Run) -> None:
    pods = [here.pod(run, 0), here.pod(run, 1)]
    for number in range(4):
        here.cluster.write(pods[number % 2], f"[{number}] early {number}", at=second(number))
    following = Following(here, run)
    following.until(lambda lines: len(lines) == 4)
    here.cluster.write(pods[0], "[0] late")
    following.until(lambda lines: "late" in lines)
    here.cluster.write(pods[1], "[2] last")
    finish(here, run, *pods)
    assert following.end() == ["early 0", "early 1", "early 2", "early 3", "late", "last"]


def test_following_waits_for_a_queued_run_to_begin(here: Case, run: Run) -> None:
    following = Following(here, run)
    time.sleep(0.2)
    pod = here.pod(run, 0, state="waiting")
    here.cluster.write(pod, "[0] first")
    here.pod(run, 0)
    following.until(lambda lines: lines == ["first"])
    finish(here, run, pod)
    assert following.end() == ["first"]


def test_following_survives_dropped_connections(here: Case, run: Run) -> None:
    pod = here.pod(run, 0)
    for after in (0, 1, 3):
        here.cluster.trouble("GET", "follow=true", "cut", amount=after)
    here.cluster.trouble("GET", "follow=true", "503")
    following = Following(here, run)
    moment = second(30.25)
    for number in range(12):
        here.cluster.write(pod, f"[0] {number}", at=moment if number % 3 else second(30 + number / 100))
        moment = second(30 + (number + 1) / 100)
        time.sleep(0.02)
    following.until(lambda lines: len(lines) >= 12)
    finish(here, run, pod)
    assert following.end() == [str(number) for number in range(12)]
    assert not any(trouble.times for trouble in here.cluster.troubles)


def test_following_goes_over_restarts_of_the_gang(here: Case, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come in order, even if the last output of an attempt arrives late."""
    lines_of = k8s_streams.StreamReader.lines

    def late(self: Any, **how: Any) -> Iterator[Any]:
        for line in lines_of(self, **how):
            time.sleep(0.5 if b"dying" in line.text else 0.0)
            yield line

    monkeypatch.setattr(k8s_streams.StreamReader, "lines", late)
    first = [here.pod(run, node) for node in (0, 1)]
    here.cluster.write(first[0], "[0] one")
    following = Following(here, run)
    following.until(lambda lines: lines == ["one"])
    here.cluster.write(first[0], "[0] dying")
    for pod in first:
        here.end_pod(pod, 1)
    second_ones = [here.pod(run, node, attempt=1) for node in (0, 1)]
    here.cluster.write(second_ones[1], "[2] two")
    following.until(lambda lines: "two" in lines)
    finish(here, run, *second_ones)
    assert following.end() == ["one", "dying", "two"]


def test_following_one_attempt_ends_with_the_run_and_shows_no_other(here: Case, run: Run) -> None:
    first = here.pod(run, 0)
    here.cluster.write(first, "[0] one")
    here.end_pod(first, 1)
    other = here.pod(run, 0, attempt=1)
    here.cluster.write(other, "[0] two")
    following = Following(here, run, attempt=1)
    following.until(lambda lines: lines == ["one"])
    finish(here, run, other)
    assert following.end() == ["one"]


def test_following_ends_when_the_run_is_deleted(here: Case, run: Run) -> None:
    pod = here.pod(run, 0)
    here.cluster.write(pod, "[0] one")
    following = Following(here, run)
    following.until(lambda lines: lines == ["one"])
    here.target.cancel(run, now=True)
    assert following.end() == ["one"]
    assert here.target.status(run).state == "cancelled"


def test_more_nodes_than_can_be_read_at_once_are_all_shown(
    here: Case, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(k8s_logs, "_AT_ONCE", 1)
    pods = [here.pod(run, node) for node in (0, 1)]
    here.cluster.write(pods[0], "[0] late", at=second(9))
    here.cluster.write(pods[1], "[2] early", at=second(1))
    said = ["partool: the run has 2 nodes: they are merged by 1; --rank shows any rank", "late", "early"]
    assert texts(here, run) == said
    finish(here, run, *pods)
    assert texts(here, run, follow=True)[1:] == ["late"]
    assert texts(here, run, follow=True, rank=2) == ["early"]
