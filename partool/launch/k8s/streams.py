"""Reads the output of one agent's container over as many connections as needed.

The API gives the time of each line in nanoseconds (``timestamps=true``) but resumes only from a whole second
(``sinceTime``), so lines that were already seen are counted and skipped:
https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#get-read-log-of-the-specified-pod
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from partool.launch.k8s.client import BrokenOffError, Client, Document
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.resources import PODS
from partool.launch.k8s.status import agent_name, agent_of, attempt_of, node_of

PAUSE_S = 0.5
"""Seconds to wait before a dropped connection is opened again."""
PATIENCE_S = 60.0
"""Seconds of retries while a cluster cannot be reached."""
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


class Stream(NamedTuple):
    """Output of an agent's container from one start of the container to its end."""

    pod: str
    uid: str
    container: str
    node: int
    life: int
    """Number of earlier restarts of the container."""
    attempt: int
    """Number of the attempt, from 1; restarts of the gang and restarts of the container both count."""


class StreamLine(NamedTuple):
    """A line of output, with the values by which lines are sorted."""

    at_ns: int
    """Unix time in nanoseconds."""
    node: int
    text: bytes
    """Text of the line, including the line end."""


class StreamReader:
    """Reads each line of one stream once, over as many connections as needed."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client
        self.stream = stream
        self._last_ns = 0
        """Unix time in nanoseconds of the latest line."""
        self._count = 0
        """Number of lines already yielded whose time is ``_last_ns``."""

    def lines(self, *, follow: bool, previous: bool, tail: int | None = None) -> Iterator[StreamLine]:
        """Open one connection, and yield the lines that were not yielded before, of the last ``tail`` if it is given.

        Set ``previous`` if the container has been restarted since it wrote the lines. Raises BrokenOffError, and
        ApiError: 400 before the container has started, 404 once the pod is gone.
        """
        query = {"container": self.stream.container, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        query |= {"previous": "true"} if previous else {}
        query |= {"sinceTime": _stamp(self._last_ns)} if self._last_ns else {}
        query |= {"tailLines": str(tail)} if tail is not None else {}
        path = PODS.path(self._client.namespace, self.stream.pod, "log")
        until_ns, skip = self._last_ns, self._count
        with closing(self._client.stream("get", path, query)) as lines:
            for line in lines:
                stamp, _, text = line.partition(b" ")
                at_ns = _instant(stamp)
                if at_ns < until_ns:
                    continue
                if at_ns == until_ns and skip:
                    skip -= 1
                    continue
                until_ns = 0
                if not line.endswith(b"\n"):
                    if follow:
                        return  # the line's end is not written yet: the next connection sends the whole line
                    text += b"\n"
                self._count = self._count + 1 if at_ns == self._last_ns else 1
                self._last_ns = at_ns
                yield StreamLine(at_ns, self.stream.node, text)

    def rest(self) -> Iterator[StreamLine]:
        """Yield the lines written so far, reconnecting after dropped connections; yields nothing if the pod is gone."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                life = _life(self._client, self.stream)
                if life is not None:
                    yield from self.lines(follow=False, previous=life > self.stream.life)
            except BrokenOffError:
                if time.monotonic() > end:
                    raise
                time.sleep(PAUSE_S)
                continue
            except ApiError as error:
                if error.status not in (400, 404):
                    raise
            return

    def ended(self) -> bool:
        """Return True if no more lines will follow."""
        pod = self._client.get(PODS, self.stream.pod)
        if pod is None or pod["metadata"]["uid"] != self.stream.uid:
            return True
        agent = agent_of(pod)
        return "terminated" in (agent.get("state") or {}) or int(agent.get("restartCount") or 0) > self.stream.life


def _life(client: Client, stream: Stream) -> int | None:
    """Return how often the container of a stream has been restarted so far; None if the pod is gone."""
    pod = client.get(PODS, stream.pod)
    if pod is None or pod["metadata"]["uid"] != stream.uid:
        return None
    agent = agent_of(pod)
    # while the container waits for its next start, its last start is over, but restartCount does not count it yet
    waiting = "waiting" in (agent.get("state") or {})
    return int(agent.get("restartCount") or 0) + waiting


def _instant(stamp: bytes) -> int:
    """Return an RFC 3339 time stamp, which may have nine decimals and any time zone, as Unix ns; 0 if it is invalid."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return 0
    zone = match[3].replace(b"Z", b"+00:00").decode()
    whole_s = datetime.datetime.fromisoformat(match[1].decode() + zone).timestamp()
    return int(whole_s) * 10**9 + int((match[2] or b"").ljust(9, b"0"))


def _stamp(at_ns: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_ns // 10**9))


def streams(pods: list[Document]) -> list[Stream]:
    """Return a stream for every start of an agent's container whose output the cluster still has."""
    pod_streams = []
    for pod in pods:
        agent, meta = agent_of(pod), pod["metadata"]
        life, first = int(agent.get("restartCount") or 0), attempt_of(pod)
        present = {"running", "terminated"} & (agent.get("state") or {}).keys()
        lives = [life] if present else []
        if "terminated" in (agent.get("lastState") or {}):
            lives.append(life - bool(present))
        pod_streams += [
            Stream(meta["name"], meta["uid"], agent_name(pod), node_of(pod), each, first + each)
            for each in lives
            if each >= 0
        ]
    return pod_streams
