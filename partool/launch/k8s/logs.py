"""Reads the ranks' output from the logs of a run's pods, merges it by time, and follows it over restarts.

Agents print every line of their ranks as ``[RANK] text``.
"""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from partool.launch.k8s import streams as k8s_streams
from partool.launch.k8s.client import Client
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.resources import PODS
from partool.launch.k8s.streams import Stream, StreamLine, StreamReader, streams
from partool.launch.store import Run
from partool.launch.target import LaunchError, LogLine, LogQuery, NoLogsError
from partool.plan.outline import Outline, outline
from partool.plan.run import RunStatus
from partool.render.k8s.objects import RUN_LABEL

_RANK = re.compile(rb"\[(\d+)\] ?")
_LOOK_S = 10.0
"""Seconds between two checks whether the run is still active, while the run's pods do not change."""
_LAST_S = 15.0
"""Seconds to wait for the last lines of a run that has ended."""
_LAST_WORDS_S = 2.0
"""Seconds to wait for the last lines of an attempt once the next attempt has begun."""
_AT_ONCE = 100
"""Maximum number of pods read at once: each pod needs a connection, and a process may have 1,024 open files."""


def read(client: Client, run: Run, query: LogQuery, status: Callable[[], RunStatus]) -> Iterator[LogLine]:
    """Yield the lines that ``query`` selects; without ``follow``, the lines of all nodes are merged by time.

    Raises NoLogsError, and LaunchError if the cluster does not answer.
    """
    plan = _plan(run)
    node = None
    if query.rank is not None and plan is not None:
        if query.rank >= plan.ranks:
            raise NoLogsError(f"no logs of rank {query.rank} of {run.id}: it has {plan.ranks} ranks")
        node = query.rank // plan.devices.per_node
    nodes = plan.devices.nodes if plan is not None and node is None else 1
    if nodes > _AT_ONCE:
        yield LogLine(None, True, _remark(nodes, follow=query.follow))
    following = _Follower(client, run, query, node)
    lines = following.lines(status) if query.follow else _once(client, run, query, node)
    for line in lines:
        rank, text = _of_rank(line.text)
        if query.rank is None or rank == query.rank:
            yield LogLine(rank, False, text)


def _remark(nodes: int, *, follow: bool) -> bytes:
    what = f"only the first {_AT_ONCE} are followed" if follow else f"they are merged by {_AT_ONCE}"
    return f"partool: the run has {nodes} nodes: {what}; --rank shows any rank\n".encode()


def _plan(run: Run) -> Outline | None:
    try:
        return outline(run.plan_file)
    except (OSError, ValueError):
        return None


def _of_rank(text: bytes) -> tuple[int | None, bytes]:
    match = _RANK.match(text)
    return (int(match[1]), text[match.end() :]) if match else (None, text)


def _once(client: Client, run: Run, query: LogQuery, node: int | None) -> Iterator[StreamLine]:
    all_streams = _streams_of(client, run)
    chosen = _chosen(all_streams, query, node)
    if not chosen:
        kept = sorted({stream.attempt for stream in all_streams})
        available = (
            f"there is attempt {', '.join(map(str, kept))}" if kept else "its pods have not started, or are gone"
        )
        attempt = f" of attempt {query.attempt}" if query.attempt else ""
        stored = f"; a claim in launch.k8s.storage keeps them, under partool/runs/{run.id}/logs"
        raise NoLogsError(f"no logs{attempt} of {run.id}: {available}{stored}")
    for at in range(0, len(chosen), _AT_ONCE):
        yield from heapq.merge(*(StreamReader(client, stream).rest() for stream in chosen[at : at + _AT_ONCE]))


def _streams_of(client: Client, run: Run) -> list[Stream]:
    return streams(client.select(PODS, labelSelector=f"{RUN_LABEL}={run.id}"))


def _chosen(all_streams: list[Stream], query: LogQuery, node: int | None) -> list[Stream]:
    """Return the streams of the attempt that ``query`` selects, or of the latest attempt if none is selected."""
    attempt = query.attempt or max((stream.attempt for stream in all_streams), default=0)
    wanted = [stream for stream in all_streams if stream.attempt == attempt and node in (None, stream.node)]
    return sorted(wanted, key=lambda stream: stream.node)


class _Follower:
    """Reads all streams of a run (outputs of its containers) at the same time, while they are written."""

    def __init__(self, client: Client, run: Run, query: LogQuery, node: int | None) -> None:
        self._client = client
        self._run = run
        self._query = query
        self._node = node
        self._followed: set[Stream] = set()
        self._arriving: queue.SimpleQueue[StreamLine | LaunchError | None] = queue.SimpleQueue()
        """Lines and errors of the streams; None means that the pods have changed."""
        self._threads: list[tuple[int, threading.Thread]] = []
        """Pairs of an attempt and a thread that reads one of the attempt's streams."""
        self._stop = threading.Event()

    def lines(self, status: Callable[[], RunStatus]) -> Iterator[StreamLine]:
        """Yield existing lines in order, then new lines as they arrive, until the run has ended and no line is left."""
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            while True:
                # requested before the pods, so that the output of a run that has just ended is still found
                active = _patiently(status).active
                fresh = [stream for stream in _patiently(self._present) if stream not in self._followed]
                self._followed.update(fresh)
                if fresh:
                    yield from self._said_before(min(stream.attempt for stream in fresh))
                readers = [StreamReader(self._client, stream) for stream in fresh]
                yield from heapq.merge(*(reader.rest() for reader in readers))
                for reader in readers:
                    thread = threading.Thread(target=self._pump, args=(reader,), daemon=True)
                    thread.start()
                    self._threads.append((reader.stream.attempt, thread))
                yield from self._arrived(_LOOK_S if active else _LAST_S, until_idle=not active)
                if not active and not fresh:
                    return
        finally:
            self._stop.set()

    def _said_before(self, attempt: int) -> Iterator[StreamLine]:
        """Yield the remaining lines of attempts before ``attempt``; waits at most ``_LAST_WORDS_S`` for these lines."""
        end, heard = time.monotonic() + _LAST_WORDS_S, []
        before = [thread for other, thread in self._threads if other < attempt]
        while time.monotonic() < end and any(thread.is_alive() for thread in before):
            with suppress(queue.Empty):
                heard.append(self._arriving.get(timeout=k8s_streams.PAUSE_S))
        heard += [self._arriving.get() for _ in range(self._arriving.qsize())]
        for message in heard:
            if isinstance(message, LaunchError):
                raise message
            if message is not None:
                yield message
        if None in heard:  # the pods have changed meanwhile
            self._arriving.put(None)

    def _present(self) -> list[Stream]:
        chosen = _chosen(_streams_of(self._client, self._run), self._query, self._node)
        return chosen if self._node is not None else [stream for stream in chosen if stream.node < _AT_ONCE]

    def _arrived(self, wait_s: float, *, until_idle: bool) -> Iterator[StreamLine]:
        """Yield lines that arrive within ``wait_s``; ends early if pods change or (``until_idle``) streams end."""
        end, earliest = time.monotonic() + wait_s, time.monotonic() + k8s_streams.PAUSE_S
        rung = False
        while True:
            idle = until_idle and not any(thread.is_alive() for _, thread in self._threads)
            until = earliest if rung else end
            try:
                left_s = 0.0 if idle else until - time.monotonic()
                # zero means no waiting
                message = self._arriving.get(left_s > 0, min(max(left_s, 0.0), k8s_streams.PAUSE_S))
            except queue.Empty:
                if idle or time.monotonic() >= until:
                    return
                continue
            if isinstance(message, LaunchError):
                raise message
            if message is None:
                rung = not until_idle
            else:
                yield message

    def _listen(self) -> None:
        """Put None in the queue whenever pods come, change or go."""
        selector = f"{RUN_LABEL}={self._run.id}"
        while not self._stop.is_set():
            # Pods are also polled, so a failed watch is harmless. The client reads KUBECONFIG anew, which may be gone.
            with suppress(LaunchError, KeyError):
                for _ in self._client.watch(PODS, labelSelector=selector):
                    self._arriving.put(None)
                    if self._stop.is_set():
                        return
            self._stop.wait(_LOOK_S)

    def _pump(self, reader: StreamReader) -> None:
        """Put a container's lines in the queue until the container has ended; reconnects as often as needed."""
        end = time.monotonic() + k8s_streams.PATIENCE_S
        while not self._stop.is_set():
            try:
                over = reader.ended()
                for line in reader.rest() if over else reader.lines(follow=True, previous=False):
                    self._arriving.put(line)
                    end = time.monotonic() + k8s_streams.PATIENCE_S
                    if self._stop.is_set():
                        return
                if over:
                    return
            except LaunchError as error:
                if isinstance(error, ApiError) and error.status in (400, 404):
                    pass  # the container has not begun, or the pod is gone: the next check decides
                elif error.code != "PT576" or time.monotonic() > end:
                    self._arriving.put(error)
                    return
            self._stop.wait(k8s_streams.PAUSE_S)


_T = TypeVar("_T")


def _patiently(ask: Callable[[], _T]) -> _T:
    """Call ``ask`` until the cluster answers, for at most a minute."""
    end = time.monotonic() + k8s_streams.PATIENCE_S
    while True:
        try:
            return ask()
        except LaunchError as error:
            if error.code != "PT576" or time.monotonic() > end:
                raise
            time.sleep(k8s_streams.PAUSE_S)
