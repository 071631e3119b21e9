"""Pure functions that derive the status of a Kubernetes job from the API's answers.

Conditions by kind: Job (https://kubernetes.io/docs/concepts/workloads/controllers/job/), JobSet (jobset.x-k8s.io,
``JobSetStatus``), PyTorchJob (kubeflow.org/v1, ``JobStatus``), TrainJob (trainer.kubeflow.org, ``TrainJobStatus``),
Volcano (batch.volcano.sh, ``JobStatus``).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from partool.launch.telling import telling
from partool.plan.run import RunStatus, State

Document = dict[str, Any]

KINDS = {
    "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "job": ("batch/v1", "Job"),
    "pytorchjob": ("kubeflow.org/v1", "PyTorchJob"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "volcano": ("batch.volcano.sh/v1alpha1", "Job"),
}
"""``launch.k8s.kind`` → apiVersion and kind of the object."""
_PREEMPTED, _GIVES_UP = 75, 78
_DONE = ("Completed", "Complete", "Succeeded")
_HARMLESS = ("", "ContainerCreating", "PodInitializing")
_INDEXES = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    "volcano.sh/task-index",
)
_ATTEMPTS = (
    "jobset.sigs.k8s.io/restart-attempt",
    "volcano.sh/job-version",
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)
"""Labels that count the restarts before a pod was made; for a Job, the count is the sum of the last two labels."""
_AGENTS = ("node", "pytorch")
Phase = Literal["suspended", "active", "done", "failed"]


class Progress(NamedTuple):
    """Progress of a job as its object reports it."""

    phase: Phase
    reason: str = ""
    restarts: int = 0
    ended: float | None = None


class Ending(NamedTuple):
    """End of an agent's container."""

    node: int
    pod: str
    code: int
    reason: str
    """Reason that the kubelet gives (``Error``, ``OOMKilled``) or that the pod has (``Evicted``)."""
    message: str
    """Text that the agent wrote into the termination log."""
    at: float | None
    """Unix time at which the container ended, in whole seconds."""

    @property
    def killed(self) -> bool:
        """True if the kubelet stopped the agent, for example because another pod failed; False if memory ran out."""
        return self.code in (137, 143) and self.reason in ("", "Error")

    @property
    def text(self) -> str:
        """The ending in words, in one line: exit code, reason, node, and the agent's message."""
        why = "" if self.reason in ("", "Error") else f" ({self.reason})"
        said = telling(self.message)
        return f"exit code {self.code}{why} on node {self.node}" + (f": {said}" if said else "")


def seconds(stamp: str | None) -> float | None:
    """Return a time stamp of the API as Unix time."""
    if not stamp:
        return None
    return datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def _marks(pod: Document) -> dict[str, str]:
    return {**(pod["metadata"].get("annotations") or {}), **(pod["metadata"].get("labels") or {})}


def node_of(pod: Document) -> int:
    """Return the node number of a pod, taken from the pod's labels or, if missing, from the end of its name."""
    labels = _marks(pod)
    by_name = re.search(r"-(\d+)$", pod["metadata"]["name"])
    unlabelled = int(by_name[1]) if by_name else 0
    index = next((int(labels[name]) for name in _INDEXES if labels.get(name, "").isdigit()), unlabelled)
    # the master of a PyTorchJob is node 0, its first worker node 1
    return index + (labels.get("training.kubeflow.org/replica-type", "").lower() == "worker")


def attempt_of(pod: Document) -> int:
    """Return the number of the attempt in which a pod was made: 1 plus the number of earlier restarts of the gang.

    Restarts of a container inside its pod do not count.
    """
    marks = _marks(pod)
    return 1 + sum(int(marks[name]) for name in _ATTEMPTS if marks.get(name, "").isdigit())


def agent_of(pod: Document) -> Document:
    """Return the status of the agent's container; empty if the pod has no such status yet."""
    statuses: list[Document] = pod.get("status", {}).get("containerStatuses") or []
    return next((each for each in statuses if each["name"] in _AGENTS), statuses[0] if statuses else {})


def agent_name(pod: Document) -> str:
    """Return the name of the agent's container."""
    names: list[str] = [container["name"] for container in pod["spec"]["containers"]]
    return next((name for name in names if name in _AGENTS), names[0])


def current(pods: Iterable[Document]) -> list[Document]:
    """Return the newest pod of each node, sorted by node number."""
    newest: dict[int, Document] = {}
    for pod in sorted(pods, key=lambda pod: (attempt_of(pod), pod["metadata"].get("creationTimestamp") or "")):
        newest[node_of(pod)] = pod
    latest = max((attempt_of(pod) for pod in newest.values()), default=1)
    gang = [
        node for node, pod in newest.items() if attempt_of(pod) == latest or _phase(pod) in ("Running", "Succeeded")
    ]
    return [newest[node] for node in sorted(gang)]


def endings(pods: Iterable[Document], *, earlier: bool = False) -> list[Ending]:
    """Return the endings of agents that failed, in order of time.

    With ``earlier``, the result includes failures after which the kubelet restarted the agent inside its pod.
    """
    failures = []
    for pod in pods:
        agent, status = agent_of(pod), pod.get("status", {})
        states = [agent.get("state") or {}] + ([agent.get("lastState") or {}] if earlier else [])
        node, name = node_of(pod), pod["metadata"]["name"]
        for ended in (state["terminated"] for state in states if "terminated" in state):
            if code := ended.get("exitCode", 0):
                at = seconds(ended.get("finishedAt"))
                failures.append(Ending(node, name, code, ended.get("reason", ""), ended.get("message", ""), at))
        if status.get("phase") == "Failed" and status.get("reason"):  # evicted, or never started
            failures.append(Ending(node, name, 137, status["reason"], status.get("message", ""), None))
    return sorted(failures, key=lambda ending: (ending.at is None, ending.at or 0.0, ending.killed, ending.node))


def combined_code(failures: Sequence[Ending]) -> int | None:
    """Return the run's exit code: 78 (configuration) if it occurred, 75 (preempted) only if no other code occurred.

    If several other codes occurred, the first is returned; without endings, None.
    """
    codes = [ending.code for ending in failures]
    if _GIVES_UP in codes:
        return _GIVES_UP
    return next((code for code in codes if code != _PREEMPTED), _PREEMPTED if codes else None)


def progress(kind: str, job: Document) -> Progress:
    """Return the progress that the job's object reports."""
    status = job.get("status") or {}
    if kind == "volcano":
        return _volcano(status)
    restarts = int(status.get("restarts") or 0)
    true = {each["type"]: each for each in status.get("conditions") or [] if each.get("status") == "True"}
    for name in _DONE:
        if name in true:
            return Progress("done", "", restarts, _ended(status, true[name]))
    if "Failed" in true:
        failed = true["Failed"]
        return Progress("failed", _words(failed), restarts, _ended(status, failed))
    spec = job.get("spec") or {}
    if spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"):
        return Progress("suspended", _words(true["Suspended"]) if "Suspended" in true else "", restarts)
    return Progress("active", "", restarts)


def _volcano(status: Document) -> Progress:
    state = status.get("state") or {}
    restarts, ended = int(status.get("retryCount") or 0), seconds(state.get("lastTransitionTime"))
    phase = state.get("phase", "")
    if phase == "Completed":
        return Progress("done", "", restarts, ended)
    if phase in ("Failed", "Aborted", "Terminated"):
        return Progress("failed", _words(state) or phase.lower(), restarts, ended)
    return Progress("active", "", restarts)


def _ended(status: Document, condition: Document) -> float | None:
    return seconds(status.get("completionTime") or condition.get("lastTransitionTime"))


def _words(condition: Document) -> str:
    return ": ".join(part for part in (condition.get("reason"), condition.get("message")) if part)


def judge(record: RunStatus, kind: str, job: Document, pods: Sequence[Document], nodes: int) -> RunStatus:
    """Return the status of a run; ``record`` is the run's earlier status, ``nodes`` the expected number of pods."""
    seen, gang = progress(kind, job), current(pods)
    began = [at for pod in gang if (at := seconds(pod.get("status", {}).get("startTime"))) is not None]
    in_place = max((int(agent_of(pod).get("restartCount") or 0) for pod in gang), default=0)
    earlier = max([seen.restarts, *(attempt_of(pod) - 1 for pod in gang)])
    facts: dict[str, Any] = {
        "started": min(began) if began else record.started,
        "attempt": earlier + in_place + 1 if gang else max(record.attempt, earlier),
        "ended": None,
        "exit_code": None,
    }
    if seen.phase == "done":
        facts |= {"state": "done", "reason": "", "exit_code": 0, "ended": seen.ended}
    elif seen.phase == "failed":
        facts |= _failed(seen, gang)
    elif job["metadata"].get("deletionTimestamp"):
        facts |= {"state": "running" if gang else "queued", "reason": "stopping"}
    elif seen.phase == "suspended":
        facts |= {"state": "queued", "reason": seen.reason or "suspended"}
    else:
        facts["state"], facts["reason"] = _active(gang, nodes)
    return record.model_copy(update=facts)


def _failed(seen: Progress, gang: Sequence[Document]) -> dict[str, Any]:
    failures = endings(gang, earlier=True)
    code = combined_code(failures)
    state: State = "preempted" if code == _PREEMPTED else "failed"
    first = next((ending for ending in failures if ending.code == code), None)
    reason = seen.reason if first is None else f"{first.text} ({seen.reason.partition(':')[0] or 'failed'})"
    return {"state": state, "reason": reason, "exit_code": code, "ended": seen.ended}


def _active(gang: Sequence[Document], nodes: int) -> tuple[State, str]:
    """Return the state of an active job, and why it waits or which agent has failed; empty if neither holds."""
    if not gang:
        return "queued", "there are no pods yet"
    waiting = [text for pod in gang if (text := _unscheduled(pod))]
    if waiting:
        return "queued", f"{len(waiting)} of {nodes} pods wait for a node: {waiting[0]}"
    for pod in gang:
        if text := _stuck(pod):
            return "starting", f"node {node_of(pod)}: {text}"
    started = sum(_phase(pod) in ("Running", "Succeeded", "Failed") for pod in gang)
    if started < nodes:
        return "starting", f"{started} of {nodes} pods have started"
    ended = endings(gang)
    return "running", f"{ended[0].text}; the others will end too" if ended else ""


def _phase(pod: Document) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _unscheduled(pod: Document) -> str:
    """Return the reason why a pod has no node; empty if the pod has a node."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _words(condition) or "not scheduled"
    return ""


def _stuck(pod: Document) -> str:
    """Return the reason why a container does not start, such as a missing image or Secret."""
    status = pod.get("status", {})
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "") not in _HARMLESS:
            return _words(waiting)
    return ""
