"""Target for Slurm: submits jobs with sbatch, and follows, cancels and compares jobs."""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from partool.diagnostics.record import Diagnostic
from partool.launch.describe import errors_as_text
from partool.launch.slurm import logs as slurm_logs
from partool.launch.slurm.client import Slurm, call, missing_command
from partool.launch.slurm.refusal import refusal
from partool.launch.slurm.script import environment_of, test_only
from partool.launch.slurm.status import run_status
from partool.launch.slurm.text import SlurmJob, parse_submission
from partool.launch.store import SUBMISSION_FILE, Run, RunStore
from partool.launch.target import ClusterTarget, LaunchError, Level, LogLine, LogQuery, level_of
from partool.plan.record import DamagedRecordError
from partool.plan.run import CANCEL_FILE, PLAN_FILE, RunStatus
from partool.plan.types import NOT_RUN, Plan
from partool.render.job import Job, Rendered
from partool.render.render import render

JOB_ID = "job_id"
CLUSTER = "cluster"
_SUBMIT_TIMEOUT_S = 120.0
_ENDING_S = 10.0
"""Seconds that a cancel waits for a job that is ending, because the job may be requeued."""
_POLL_S = 0.3
_CLOCKS_S = 2.0
_NEVER_SENT = ("not in PATH", "Unable to contact", "Connection refused", "configuration source", "uthentication")
"""Texts of errors after which the controller cannot have accepted the job."""
_LOCAL_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")


class SlurmTarget:
    """Target for the Slurm cluster that this machine's commands address."""

    def check(self, plan: Plan) -> None:
        """Raise LaunchError PT550 if this machine lacks sbatch or a related command."""
        for command in ("sbatch", "squeue", "scancel"):
            missing_command(command)

    def validate(self, job: Job, rendered: Rendered, *, crds: Path | None = None, offline: bool = False) -> list[Level]:
        """Check a job with partool's rules, with doctor's checks of a plan, and with ``sbatch --test-only``.

        ``sbatch --test-only`` queues nothing. If limits of partitions are not enforced, it accepts jobs that cannot
        start.
        """
        from partool.render.slurm.lint import lint

        rules_level = Level("own rules", True, findings=(*lint(rendered.text), *_where(job)))
        return [rules_level] if offline else [rules_level, _on_cluster(job.plan), test_only(job, rendered)]

    def submit(self, run: Run, job: Job, rendered: Rendered) -> dict[str, str]:
        """Run sbatch; returns ``job_id`` and, with several clusters, ``cluster``.

        If no answer arrives, the queue is searched for the run's name, so that the job is neither submitted twice nor
        left behind.
        """
        start = time.time()
        slurm = Slurm(_cluster_of(rendered.text))
        command = ["sbatch", "--parsable", str(run.path / rendered.main)]
        try:
            answer = call(command, environment=environment_of(rendered.text), timeout_s=_SUBMIT_TIMEOUT_S)
            if answer.code == 0:
                return _details(*parse_submission(answer.out))
        except (LaunchError, ValueError) as error:
            if lost_job := _lost(slurm, run.id, start, error):
                return _details(lost_job.job_id, slurm.cluster)
            if isinstance(error, LaunchError):
                raise
            raise LaunchError("PT552", f"sbatch: {error}", f"see squeue --name={run.id}") from None
        except BaseException:  # interrupted, so the job may or may not exist
            with suppress(LaunchError):
                slurm.cancel_named(run.id)
            raise
        finding = refusal(answer.err, job.plan)
        raise LaunchError(finding.code, finding.message, finding.help)

    def withdraw(self, run: Run, details: dict[str, str]) -> None:
        """Cancel a job that has just been submitted."""
        Slurm(details.get(CLUSTER, "")).cancel([details[JOB_ID]])

    def status(self, run: Run) -> RunStatus:
        """Return the status of the run; raises LaunchError PT550 if Slurm does not answer."""
        return self.statuses([run])[run.id]

    def statuses(self, runs: Sequence[Run]) -> dict[str, RunStatus]:
        """Return the status of several runs, by run id; squeue is called once per cluster."""
        by_run: dict[str, RunStatus] = {}
        by_cluster: dict[str, dict[str, Run]] = {}
        for run in runs:
            job_id, cluster = _submitted(run)
            if job_id:
                by_cluster.setdefault(cluster, {})[job_id] = run
            else:
                by_run[run.id] = run.status()
        for cluster, of_job in by_cluster.items():
            jobs = _jobs_by_id(Slurm(cluster), list(of_job))
            for job_id, run in of_job.items():
                of_run = jobs.get(job_id, [])
                single = next((job for job in of_run if job.task is None), None)
                by_run[run.id] = run_status(run, single, job_id, of_run)
        return by_run

    def cancel(self, run: Run, *, now: bool) -> bool:
        """Remove a waiting job from the queue; ask a running job to checkpoint and stop or, with ``now``, kill it.

        Raises LaunchError PT553 if scancel refuses.
        """
        job_id, cluster = _submitted(run)
        slurm = Slurm(cluster)
        jobs = [job for job in slurm.jobs([job_id]) if job.active] if job_id else []
        if not jobs:
            return False
        # Created before any signal: this file stops the job's script from requeueing the job.
        (run.path / CANCEL_FILE).touch()
        complaints = _stop(slurm, job_id, jobs, now=now)
        if all(complaints) and any(job.active for job in slurm.jobs([job_id])):
            raise LaunchError("PT553", f"Slurm does not cancel job {job_id}: {complaints[0]}", f"scancel {job_id}")
        return True

    def logs(self, run: Run, query: LogQuery) -> Iterator[LogLine]:
        """Yield lines of the ranks' output and messages of the job's script; raises NoLogsError."""
        return slurm_logs.read(run, query, lambda: self.status(run))

    def errors(self, run: Run) -> str:
        """Return the error records of all ranks as text; the records of an array are grouped by task."""
        texts = [errors_as_text(run.path)]
        for file in sorted(run.path.glob("task-*/" + PLAN_FILE)):
            if text := errors_as_text(file.parent):
                texts.append(f"{file.parent.name}\n{text}")
        return "\n".join(filter(None, texts))

    def remove(self, run: Run) -> None:
        """Cancel a job that should have ended but that Slurm still holds, as after a failed requeue."""
        job_id, cluster = _submitted(run)
        slurm = Slurm(cluster)
        if job_id and any(job.active for job in slurm.jobs([job_id])):
            slurm.cancel([job_id])

    def diff(self, job: Job, rendered: Rendered) -> str:
        """Return the diff from the newest run's files to ``job`` rendered with that run's id and folder.

        The newest run is the newest Slurm run with the plan's name. If there is none, all files are shown as new.
        """
        before = next((run for run in RunStore().runs() if run.goes_by(job.plan.name) and _is_ours(run)), None)
        if before is None:
            return _unified({}, rendered.files, "nothing", job.run_id)
        rerendered = replace(job, run_id=before.id, run_dir=PurePosixPath(before.path))
        ours = render("slurm", rerendered).files
        theirs = {name: _content(before.path / name) for name in _rendered_names(before.path) | set(ours)}
        return _unified(theirs, ours, before.id, "now")


def _on_cluster(plan: Plan) -> Level:
    """Compare a plan with the cluster's resources and the user's permissions."""
    from partool.launch.slurm.doctor import configuration
    from partool.launch.slurm.doctor_plan import plan_checks

    name = "doctor's checks of the plan"
    try:
        return level_of(name, plan_checks(plan, configuration()))
    except LaunchError as error:
        return Level(name, False, error.message)


def _stop(slurm: Slurm, job_id: str, jobs: list[SlurmJob], *, now: bool) -> list[str]:
    """Cancel or signal a job or each task of an array, depending on its state; returns scancel's answers."""
    if now:
        return [slurm.cancel([job_id], "--full", "--signal=KILL"), slurm.cancel([job_id])]
    complaints = []
    if running := [job.id for job in jobs if job.state == "RUNNING"]:
        complaints.append(slurm.cancel(running, "--batch", "--signal=USR2"))
    end = time.monotonic() + _ENDING_S
    while True:
        if idle := [job.id for job in jobs if job.active and job.state not in ("RUNNING", "COMPLETING")]:
            complaints.append(slurm.cancel(idle))
        jobs = [job for job in jobs if job.state == "COMPLETING"]
        if not jobs or time.monotonic() > end:
            return complaints
        time.sleep(_POLL_S)  # the job may be requeued, and no signal reaches a job in the queue
        ids = {job.id for job in jobs}
        jobs = [job for job in slurm.jobs([job_id]) if job.id in ids]


def _where(job: Job) -> list[Diagnostic]:
    """Return a warning if the run's folder is probably not visible to other nodes."""
    place = next((place for place in _LOCAL_PLACES if str(job.run_dir).startswith(place + "/")), None)
    if place is None:
        return []
    message = f"runs are kept in {job.run_dir.parent}, and {place} is usually another one on every node"
    help = "set PARTOOL_HOME to a folder on a file system that all nodes share"
    return [Diagnostic("PT554", message, "warning", help=help)]


def _lost(slurm: Slurm, name: str, start: float, error: Exception) -> SlurmJob | None:
    """Return the job of a submission that was not confirmed, if it exists; ``start`` is the submission's Unix time.

    Raises LaunchError PT552 if Slurm cannot be asked.
    """
    if isinstance(error, LaunchError) and any(sign in error.message for sign in _NEVER_SENT):
        return None
    try:
        # A resumed run had earlier jobs of this name; clocks may differ a little.
        jobs = [job for job in slurm.named(name) if (job.submitted or start) >= start - _CLOCKS_S]
    except LaunchError as second:
        said = error.message if isinstance(error, LaunchError) else str(error)
        message = f"{said}; whether the job was taken is not known ({second.message})"
        help = f"once Slurm answers: scancel --name={name}, then launch again"
        raise LaunchError("PT552", message, help) from None
    return max(jobs, key=lambda job: int(job.job_id), default=None)


def _jobs_by_id(slurm: Slurm, ids: list[str]) -> dict[str, list[SlurmJob]]:
    """Return the jobs by id: from the queue or, if the controller has forgotten a job, from accounting."""
    by_id: dict[str, list[SlurmJob]] = {}
    for job in slurm.jobs(ids):
        by_id.setdefault(job.job_id, []).append(job)
    for job in slurm.recorded([job_id for job_id in ids if job_id not in by_id]):
        by_id.setdefault(job.job_id, []).append(job)
    return by_id


def _submitted(run: Run) -> tuple[str, str]:
    """Return the run's job id and cluster; both are empty if the run was never submitted.

    If the launcher was killed before it could record the job id, the job is found by the run's name. Raises
    DamagedRecordError for a record that no submission wrote.
    """
    submission = run.submission()
    if submission is not None and not submission.details:
        newest = max(Slurm().named(run.id), key=lambda job: int(job.job_id), default=None)
        return newest.job_id if newest else "", ""
    details = submission.details if submission else {}
    job_id = details.get(JOB_ID, "")
    if job_id and not re.fullmatch(r"[0-9]{1,18}", job_id):
        raise DamagedRecordError(f"{run.path / SUBMISSION_FILE}: `details.{JOB_ID}` must be the number of a job")
    return job_id, details.get(CLUSTER, "")


def _details(job_id: str, cluster: str) -> dict[str, str]:
    return {JOB_ID: job_id, **({CLUSTER: cluster} if cluster else {})}


def _cluster_of(script: str) -> str:
    """Return the cluster that a script or the environment selects for a job; empty for the default cluster."""
    match = re.search(r"^#SBATCH --clusters=(\S+)", script, re.MULTILINE)
    return match[1] if match else os.environ.get("SBATCH_CLUSTERS", "")


def _is_ours(run: Run) -> bool:
    try:
        submission = run.submission()
    except ValueError:
        return False
    return submission is not None and submission.target == "slurm"


def _rendered_names(folder: Path) -> set[str]:
    patterns = ("job.sbatch", "node.sh", PLAN_FILE, f"task-*/{PLAN_FILE}", "plan-*-nodes.json")
    return {str(file.relative_to(folder)) for pattern in patterns for file in folder.glob(pattern)}


def _content(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _unified(before: dict[str, str], after: dict[str, str], name: str, other: str) -> str:
    parts: list[str] = []
    for file in sorted(before.keys() | after.keys()):
        old, new = (_comparable(file, texts.get(file, "")).splitlines(keepends=True) for texts in (before, after))
        parts += difflib.unified_diff(old, new, f"{name}/{file}", f"{other}/{file}")
    return "".join(parts)


def _comparable(file: str, text: str) -> str:
    """Return ``text``, the content of ``file``. For a plan, fields that do not affect a run are left out."""
    if not file.endswith(".json") or not text:
        return text
    try:
        content = {key: value for key, value in json.loads(text).items() if key not in NOT_RUN}
    except ValueError:
        return text
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


TARGET: type[ClusterTarget] = SlurmTarget
