"""The last step that the log of a running job names: ``progress.json`` of such a run is in the cluster.

Rank 0 prints a line every ``training.log_every`` steps, and the kubelet stamps lines with their time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from partool.launch.k8s.client import Client, Document
from partool.launch.k8s.streams import StreamReader, streams
from partool.launch.target import LaunchError
from partool.plan.progress import LoggedStep
from partool.plan.run import RunStatus

LINES = 500
"""Number of a log's last lines that are read."""
_STEP = re.compile(rb"(?:\[0\] ?)? *step +(\d+)/\d+ +(?! |validation)")
_UNKNOWN = "last step unknown"


def with_last_step(client: Client, status: RunStatus, pods: Sequence[Document]) -> RunStatus:
    """Return the status of a running run with its last logged step, or with the reason why that is not known."""
    if status.state != "running":
        return status
    of_node_0 = [stream for stream in streams(list(pods)) if stream.node == 0]
    if not of_node_0:
        return status.model_copy(update={"unknown_step": f"{_UNKNOWN}: node 0 has no log yet"})
    newest = max(of_node_0, key=lambda stream: stream.attempt)
    try:
        lines = list(StreamReader(client, newest).lines(follow=False, previous=False, tail=LINES))
    except LaunchError as error:
        return status.model_copy(update={"unknown_step": f"{_UNKNOWN}: {error.message}"})
    for line in reversed(lines):
        if match := _STEP.match(line.text):
            return status.model_copy(update={"logged_step": LoggedStep(step=int(match[1]), at=line.at_ns / 1e9)})
    missing = "no step logged yet" if len(lines) < LINES else f"{_UNKNOWN}: not in the last {LINES} lines of the log"
    return status.model_copy(update={"unknown_step": missing})
