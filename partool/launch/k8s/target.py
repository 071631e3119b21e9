"""Target for Kubernetes: runs as a JobSet, Job, PyTorchJob, TrainJob or Volcano job, with or without Kueue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from partool.diagnostics.record import Diagnostic
from partool.launch.k8s import diff as k8s_diff
from partool.launch.k8s import logs as k8s_logs
from partool.launch.k8s import waiting as k8s_waiting
from partool.launch.k8s.client import Client, Document
from partool.launch.k8s.errors import ApiError
from partool.launch.k8s.last_step import with_last_step
from partool.launch.k8s.resources import PODS, RESOURCES, resource_of
from partool.launch.k8s.status import KINDS, current, endings, judge
from partool.launch.k8s.submit import Transaction, remove
from partool.launch.store import SUBMISSION_FILE, Run, RunStore
from partool.launch.target import ClusterTarget, LaunchError, Level, LogLine, LogQuery, level_of
from partool.plan.outline import outline
from partool.plan.record import DamagedRecordError
from partool.plan.run import CANCEL_FILE, RunStatus, write_status
from partool.plan.types import Plan
from partool.render.job import Job, Rendered
from partool.render.k8s import agents_key
from partool.render.k8s.objects import RUN_LABEL

ERRORS_FILE = "errors.txt"
"""File that keeps the error records of an ended run, because the cluster deletes the originals with the pods."""
_DRY_RUN = "server-side dry run"
_MOST_LOGS = 20
"""Number of runs whose logs one command reads for their last step."""


class ObjectPlace(NamedTuple):
    """Location of a run's job object."""

    context: str
    namespace: str
    kind: str
    """Value of ``launch.k8s.kind``."""
    name: str
    uid: str
    """UID of the object; empty if it was not recorded."""
    nodes: int


class K8sTarget:
    """Target for runs on a Kubernetes cluster."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, str], Client] = {}

    def check(self, plan: Plan) -> None:
        """Raise LaunchError if the client package, the cluster or the kind of job on the cluster is missing."""
        client = self._client_for(plan)
        client.get(RESOURCES[KINDS[plan.launch.k8s.kind]], "partool")  # fails if the kind is unknown or forbidden

    def validate(
        self, job: Job, rendered: Rendered, *, crds: Path | None = None, offline: bool = False
    ) -> Sequence[Level]:
        """Check a manifest against the available schemas, then on the cluster.

        The schemas for the cluster's version are used if this version is known. On the cluster, doctor's checks of the
        plan run first, then a server-side dry run.
        """
        from partool.launch.k8s.validate import validate_offline

        context = job.plan.launch.k8s.context
        if offline:
            return validate_offline(rendered.text, crds=crds, context=context)
        try:
            client = self._client_for(job.plan)
            version = client.version()
        except LaunchError as error:
            levels = validate_offline(rendered.text, crds=crds, context=context)
            return [*levels, Level(_DRY_RUN, ran=False, note=error.message)]
        levels = validate_offline(rendered.text, crds=crds, context=context, core_version=version)
        return [*levels, _on_cluster(client, job.plan), _dry_run(client, version, rendered)]

    def submit(self, run: Run, job: Job, rendered: Rendered) -> dict[str, str]:
        """Create the objects; if one cannot be created, deletes all created objects and raises LaunchError."""
        spec = job.plan.launch.k8s
        client = self._client_for(job.plan)
        documents = list(yaml.load_all(rendered.text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        transaction = Transaction(client, run, [*(dict(each) for each in agents_key(job)), *documents], spec.kind)
        created = transaction.submit(float(job.plan.launch.window_s))
        (run.path / CANCEL_FILE).unlink(missing_ok=True)
        (run.path / ERRORS_FILE).unlink(missing_ok=True)
        return {
            "kind": spec.kind,
            "namespace": created["metadata"]["namespace"],
            "name": created["metadata"]["name"],
            "uid": created["metadata"]["uid"],
            "context": client.context,
            "nodes": str(job.plan.devices.nodes),
        }

    def withdraw(self, run: Run, details: dict[str, str]) -> None:
        """Delete the objects that have just been created for a run."""
        client = self._client(details["context"], details["namespace"])
        remove(client, RESOURCES[KINDS[details["kind"]]], details["name"], details["uid"], 0.0)

    def remove(self, run: Run) -> None:
        """Delete the objects of a run that has ended, because the run's next start needs their names."""
        place = _place(run)
        stopping_s = float(outline(run.plan_file).launch.window_s)
        client = self._client(place.context, place.namespace)
        remove(client, RESOURCES[KINDS[place.kind]], place.name, place.uid, stopping_s)

    def status(self, run: Run) -> RunStatus:
        """Return the run's status; raises LaunchError."""
        return self.statuses([run])[run.id]

    def statuses(self, runs: Sequence[Run]) -> dict[str, RunStatus]:
        """Return the status of each run, by run id; each namespace gets one request per kind of job and one for pods.

        The log of each running run gets one more, for its last step; of many runs only the first ones. Runs in a
        cluster or namespace that does not answer are ``unknown``.
        """
        return self._states(runs, logs=_MOST_LOGS)

    def _states(self, runs: Sequence[Run], *, logs: int = 0) -> dict[str, RunStatus]:
        """Return the status of each run; at most ``logs`` of them with the last step."""
        groups: dict[tuple[str, str], list[tuple[Run, ObjectPlace]]] = {}
        for run in runs:
            place = _place(run)
            groups.setdefault((place.context, place.namespace), []).append((run, place))
        by_run: dict[str, RunStatus] = {}
        for (context, namespace), some in groups.items():
            try:
                states = _statuses(self._client(context, namespace), some, logs)
                logs -= sum(one.state == "running" for one in states.values())
                by_run |= states
            except LaunchError as error:
                if len(groups) == 1:
                    raise
                unknown = {"state": "unknown", "reason": error.message}
                by_run |= {run.id: run.status().model_copy(update=unknown) for run, _ in some}
        return by_run

    def cancel(self, run: Run, *, now: bool) -> bool:
        """Delete the pods, then the job; unless ``now`` is set, the pods get time to write a checkpoint."""
        place = _place(run)
        client = self._client(place.context, place.namespace)
        if run.submission() is not None and not self._states([run])[run.id].active:
            return False
        mark = run.path / CANCEL_FILE
        mark.touch()  # before deleting: a missing job counts as cancelled even if this process dies here
        try:
            asked = client.delete(RESOURCES[KINDS[place.kind]], place.name, uid=place.uid or None)
        except LaunchError:
            mark.unlink()
            raise
        if asked and now:
            client.kill_pods(f"{RUN_LABEL}={run.id}")
        return asked

    def logs(self, run: Run, query: LogQuery) -> Iterator[LogLine]:
        """Yield lines of the ranks' output; raises NoLogsError, and LaunchError if the cluster does not answer."""
        place = _place(run)
        client = self._client(place.context, place.namespace)
        return k8s_logs.read(client, run, query, lambda: self._states([run])[run.id])

    def errors(self, run: Run) -> str:
        """Return the last messages of failed agents whose pods still exist, including agents of earlier attempts."""
        place = _place(run)
        pods = self._client(place.context, place.namespace).select(PODS, labelSelector=f"{RUN_LABEL}={run.id}")
        if text := _errors(pods):
            return text
        kept = run.path / ERRORS_FILE
        return kept.read_text(encoding="utf-8") if kept.exists() else ""

    def diff(self, job: Job, rendered: Rendered) -> str:
        """Return the diff from the objects of the latest run with the job's name to the manifest."""
        client = self._client_for(job.plan)
        name = _latest(job)
        parts = []
        for document in yaml.load_all(rendered.text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            object_name = str(document["metadata"]["name"])
            live = client.get(resource_of(document), object_name.replace(job.run_id, name))
            if live is not None and live["metadata"].get("labels", {}).get(RUN_LABEL) != name:
                live = None
            renamed = None if live is None else k8s_diff.renamed(live, name, job.run_id)
            parts.append(
                k8s_diff.unified(renamed, document, f"{document['kind']}/{object_name.replace(job.run_id, name)}")
            )
        return "".join(parts)

    def _client_for(self, plan: Plan) -> Client:
        spec = plan.launch.k8s
        return self._client(spec.context or "", spec.namespace or "")

    def _client(self, context: str, namespace: str) -> Client:
        if (context, namespace) not in self._clients:
            self._clients[context, namespace] = Client(context or None, namespace or None)
        return self._clients[context, namespace]


def _on_cluster(client: Client, plan: Plan) -> Level:
    """Compare a plan with the cluster's objects and permissions."""
    from partool.launch.k8s import doctor_plan as doctor_k8s_plan

    name = "doctor's checks of the plan"
    try:
        return level_of(name, doctor_k8s_plan.checks(client, plan))
    except LaunchError as error:
        return Level(name, False, error.message)


def _dry_run(client: Client, version: str, rendered: Rendered) -> Level:
    """Let the server check every object, also with its webhooks and quotas; the server stores nothing."""
    findings = []
    for document in yaml.load_all(rendered.text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        try:
            client.create(document, dry_run=True)
        except LaunchError as error:
            if not _makes_room(client, document, error):
                findings.append(Diagnostic(error.code, error.message, help=error.help))
    findings += [
        Diagnostic("PT578", f"the cluster warns: {text}", severity="warning") for text in dict.fromkeys(client.warnings)
    ]
    return Level(_DRY_RUN, ran=True, note=f"Kubernetes {version}", findings=tuple(findings))


def _makes_room(client: Client, document: Document, error: LaunchError) -> bool:
    """Return True if ``error`` is only a conflict with an object of this run; the next start replaces that object."""
    if not isinstance(error, ApiError) or error.reason != "AlreadyExists":
        return False
    existing = client.get(resource_of(document), document["metadata"]["name"])
    labels = {} if existing is None else existing["metadata"].get("labels") or {}
    return existing is None or labels.get(RUN_LABEL) == document["metadata"]["labels"].get(RUN_LABEL)


def _place(run: Run) -> ObjectPlace:
    """Return the location of a run's job object from its submission record or, without a record, from the plan."""
    submission = run.submission()
    if submission is not None and submission.details:
        return _recorded(submission.details, run)
    plan = outline(run.plan_file)
    spec = plan.launch.k8s
    return ObjectPlace(spec.context or "", spec.namespace or "", spec.kind, run.id, "", plan.devices.nodes)


def _recorded(details: dict[str, str], run: Run) -> ObjectPlace:
    """Return the location in a submission record; raises DamagedRecordError for a record that no submission wrote."""
    kind, nodes = details.get("kind", ""), details.get("nodes", "1")
    missing = [name for name in ("namespace", "name") if not details.get(name)]
    problem = "`details.kind` is no kind of job" if kind not in KINDS else ""
    problem = problem or (f"`details.{missing[0]}` is missing" if missing else "")
    if problem or not (nodes.isascii() and nodes.isdigit() and len(nodes) < 8):
        raise DamagedRecordError(f"{run.path / SUBMISSION_FILE}: {problem or '`details.nodes` must be a number'}")
    return ObjectPlace(
        details.get("context", ""), details["namespace"], kind, details["name"], details.get("uid", ""), int(nodes)
    )


def _statuses(client: Client, runs: Sequence[tuple[Run, ObjectPlace]], logs: int) -> dict[str, RunStatus]:
    """Return the status of the runs in one namespace, ``logs`` of them with the last step; raises LaunchError."""
    selector = f"{RUN_LABEL}={runs[0][0].id}" if len(runs) == 1 else RUN_LABEL
    jobs = {
        (kind, job["metadata"]["name"]): job
        for kind in {place.kind for _, place in runs}
        for job in client.select(RESOURCES[KINDS[kind]], labelSelector=selector)
    }
    # Pods are requested after the jobs: if a job has ended, its pods have ended too.
    pods: dict[str, list[Document]] = {}
    for pod in client.select(PODS, labelSelector=selector):
        pods.setdefault(pod["metadata"]["labels"][RUN_LABEL], []).append(pod)
    states = {
        run.id: _status(client, run, place, jobs.get((place.kind, place.name)), pods.get(run.id, []))
        for run, place in runs
    }
    running = [run_id for run_id, state in states.items() if state.state == "running"]
    return states | {
        run_id: with_last_step(client, states[run_id], pods.get(run_id, [])) for run_id in running[: max(logs, 0)]
    }


def _status(client: Client, run: Run, place: ObjectPlace, job: Document | None, pods: list[Document]) -> RunStatus:
    """Return a run's status; saves the status once the run has ended, because the cluster deletes finished jobs."""
    record = run.status()
    if job is None or (place.uid and job["metadata"]["uid"] != place.uid):
        judged = _gone(run, record)
    else:
        judged = judge(record, place.kind, job, pods, place.nodes)
        if judged.state == "queued":
            judged = judged.model_copy(update={"reason": k8s_waiting.why(client, place.kind, job, judged.reason)})
        elif judged.state == "starting" and len(current(pods)) < place.nodes:
            refused = k8s_waiting.refused_pods(client, job)
            judged = judged.model_copy(update={"reason": "; ".join(filter(None, (judged.reason, refused)))})
    if not judged.active and judged != record:
        with suppress(OSError):
            if text := _errors(pods):
                (run.path / ERRORS_FILE).write_text(text, encoding="utf-8")
            write_status(run.path, judged)
    return judged


def _gone(run: Run, record: RunStatus) -> RunStatus:
    """Return the status of a run whose object no longer exists."""
    if not record.active:
        return record
    mark = run.path / CANCEL_FILE
    if mark.exists():
        return record.model_copy(update={"state": "cancelled", "ended": mark.stat().st_mtime, "reason": "cancelled"})
    reason = "its job is gone from the cluster: deleted by somebody, or after an end that is not on record here"
    return record.model_copy(update={"state": "failed", "ended": time.time(), "reason": reason})


def _errors(pods: Sequence[Document]) -> str:
    parts = []
    for ending in endings(pods, earlier=True):
        at = "" if ending.at is None else time.strftime(" at %Y-%m-%d %H:%M:%S UTC", time.gmtime(ending.at))
        why = "" if ending.reason in ("", "Error") else f" ({ending.reason})"
        head = f"node {ending.node}, pod {ending.pod}: exit code {ending.code}{why}{at}"
        parts.append("\n".join([head, *(f"  {line}" for line in ending.message.strip().splitlines())]))
    return "\n".join(parts)


def _latest(job: Job) -> str:
    """Return the id of the run to compare to ``job``: its run, or the newest submitted run with the plan's name."""
    store = RunStore()
    job_run = Run(store.root / job.run_id)
    if job_run.path.is_dir():
        return job_run.id
    for run in store.runs():
        with suppress(ValueError, OSError):
            submission = run.submission()
            if submission is not None and submission.target == "k8s":
                plan: Any = json.loads(run.plan_file.read_text(encoding="utf-8"))
                if plan["name"] == job.plan.name:
                    return run.id
    return job.run_id


TARGET: type[ClusterTarget] = K8sTarget
