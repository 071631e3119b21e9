"""Output of Slurm's commands, from versions 22.05 to 25.05, and its interpretation by partool."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from _launch_case import launch_plan

from partool.launch.slurm.refusal import estimate, refusal
from partool.launch.slurm.status import merged, run_status
from partool.launch.slurm.text import (
    COLUMNS,
    ExitCode,
    SlurmJob,
    parse_accounting,
    parse_duration,
    parse_exit,
    parse_queue,
    parse_record,
    parse_submission,
)
from partool.launch.store import Run
from partool.plan.run import RunStatus, read_status, write_status


def row(**fields: str) -> str:
    """Return a line padded like squeue --Format's."""
    values = {"JobID": "7", "ArrayJobID": "7", "ArrayTaskID": "N/A", "State": "RUNNING", "exit_code": "0"} | fields
    return "".join(f"{values.get(name, 'N/A'):<{width}}"[:width] for name, width in COLUMNS) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12345\n", ("12345", "")),
        ("12345;tiger\n", ("12345", "tiger")),
        ("sbatch: Verify job submission ...\nWelcome, 12 hours left\n12345\n", ("12345", "")),
    ],
)
def test_submission(text: str, expected: tuple[str, str]) -> None:
    assert parse_submission(text) == expected


@pytest.mark.parametrize("text", ["", "Submitted\n", "-5\n"])
def test_submission_without_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="no job id"):
        parse_submission(text)


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        ("9:0", (9, 0), "exit code 9"),
        ("0:11", (0, 11), "killed by SIGSEGV"),
        ("2304", (9, 0), "exit code 9"),  # squeue of 22.05
        ("11", (0, 11), "killed by SIGSEGV"),
        ("139", (0, 11), "killed by SIGSEGV"),  # with a core file
        ("0", (0, 0), "exit code 0"),
        ("0:125", (0, 125), "killed by signal 125"),  # Slurm's own number for a job out of memory
    ],
)
def test_exit_codes(text: str, expected: tuple[int, int], words: str) -> None:
    assert parse_exit(text) == expected
    assert parse_exit(text).text() == words


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-00:00:00", 86400), ("7-12", 648000), ("00:10:00", 600), ("10", 600), ("5:30", 330), ("2-3:04", 183840),
        ("UNLIMITED", None), ("NONE", None), ("Partition_Limit", None),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_queue() -> None:
    text = (
        row(JobID="5", ArrayJobID="2", ArrayTaskID="0", State="COMPLETED", StartTime="2026-11-21T10:52:45")
        + row(JobID="2", ArrayJobID="2", ArrayTaskID="3", State="PENDING", Reason="JobArrayTaskLimit")
        + row(State="FAILED", exit_code="2304", RestartCnt="2", Name="a" * 44, Reason="NonZeroExitCode")
        + row(JobID="8", ArrayJobID="8", State="PENDING", Reason="ReqNodeNotAvail,_UnavailableNodes:gpu[1-4]")
    )
    first, waiting, failed, blocked = parse_queue("CLUSTER: tiger\n" + text)
    assert (first.job_id, first.task, first.state, first.exit) == ("2", 0, "COMPLETED", ExitCode(0, 0))
    assert first.start == time.mktime((2026, 11, 21, 10, 52, 45, 0, 0, -1))
    assert (waiting.job_id, waiting.task, waiting.waiting, waiting.exit) == ("2", 3, True, None)
    assert (failed.job_id, failed.task, failed.exit, failed.restarts) == ("7", None, ExitCode(9, 0), 2)
    assert (failed.name, failed.active) == ("a" * 44, False)
    assert blocked.reason == "ReqNodeNotAvail, UnavailableNodes:gpu[1-4]"
    assert parse_queue("") == parse_queue("slurm_load_jobs error: Invalid job id specified\n") == []


ACCOUNTING = """\
12|COMPLETED|0:0|2026-11-21T10:00:00|2026-11-21T10:05:00|2026-11-21T09:59:00|mine
13_0|FAILED|9:0|2026-11-21T10:00:00|2026-11-21T10:05:00|2026-11-21T09:59:00|mine
13_[1-3%2]|PENDING|0:0|Unknown|Unknown|2026-11-21T09:59:00|mine
14|CANCELLED by 1000|0:0|None|2026-11-21T10:05:00|2026-11-21T09:59:00|mine
15|OUT_OF_MEMORY|0:125|2026-11-21T10:00:00|2026-11-21T10:05:00|2026-11-21T09:59:00|mine
16|RUNNING|0:0|2026-11-21T10:00:00|Unknown|2026-11-21T09:59:00|mine
17.batch|COMPLETED|0:0|2026-11-21T10:00:00|2026-11-21T10:05:00|2026-11-21T10:00:00|batch
"""


def test_accounting() -> None:
    jobs = parse_accounting(ACCOUNTING)
    assert [(job.job_id, job.task, job.state) for job in jobs] == [
        ("12", None, "COMPLETED"), ("13", 0, "FAILED"), ("14", None, "CANCELLED"), ("15", None, "OUT_OF_MEMORY"),
        ("16", None, "RUNNING"),
    ]  # fmt: skip
    assert jobs[4].exit is None
    assert jobs[4].end is None
    assert parse_accounting("Slurm accounting storage is disabled\n") == []


RECORD_22_05 = (
    "JobId=2 ArrayJobId=2 ArrayTaskId=3 JobName=hello UserId=root(0) Account=(null) JobState=RUNNING Reason=None "
    "Requeue=1 Restarts=1 ExitCode=0:0 TRES=cpu=1,mem=100M,node=1,billing=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "WorkDir=/home/me/a b StdErr=/dev/null Power= \n"
)
RECORD_24_11 = (
    "JobId=9 JobName=x JobState=PENDING Reason=ReqNodeNotAvail,_Reserved_for_maintenance Comment=k=v Restarts=0 "
    "ReqTRES=cpu=8,mem=64G,node=2,billing=8,gres/gpu=16 AllocTRES=(null) OverSubscribe=NO "
    "TresPerNode=gres/gpu:h100:8\n"
)


def test_records() -> None:
    (old,) = parse_record(RECORD_22_05)
    assert (old["JobId"], old["ArrayTaskId"], old["Restarts"], old["WorkDir"]) == ("2", "3", "1", "/home/me/a b")
    assert (old["TRES"], old["CPUs/Task"], old["Power"]) == ("cpu=1,mem=100M,node=1,billing=1", "1", "")
    (new,) = parse_record(RECORD_24_11)
    assert (new["Comment"], new["TresPerNode"]) == ("k=v", "gres/gpu:h100:8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # 22.05
            "sbatch: Job 9 to start at 2026-11-21T11:02:47 using 1 processors on nodes node1 in partition main\n",
            "would start at 2026-11-21 11:02:47 on node1 (main, 1 cores)",
        ),
        (  # from 23.02 on
            "sbatch: Job 9 to start at 2026-11-21T11:02:47 a using 112 processors on nodes g[01,45] in partition batch",
            "would start at 2026-11-21 11:02:47 on g[01,45] (batch, 112 cores)",
        ),
        ("lua: welcome\n", ""),
    ],
)
def test_estimate(text: str, expected: str) -> None:
    assert estimate(text) == expected


@pytest.mark.parametrize(
    ("text", "words", "path", "help"),
    [
        (
            "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
            "Slurm refuses the job: Invalid partition name specified: nope (launch.slurm.partition is nope)",
            ("launch", "slurm", "partition"),
            "sinfo -s",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
            "Invalid account or account/partition combination specified (launch.slurm.account is ours)",
            ("launch", "slurm", "account"),
            "sacctmgr",
        ),
        (
            "allocation failure: Node count specification invalid\n",
            "Node count specification invalid (hardware.nodes is 2)",
            ("hardware", "nodes"),
            "fewer nodes",
        ),
        (
            "allocation failure: Requested node configuration is not available\n",
            "Requested node configuration is not available",
            ("hardware",),
            "no nodes have 2 node(s), 8 GPU(s) a100 each (gpus-per-node), 5T of memory each",
        ),
        (
            "/usr/bin/sbatch: unrecognized option '--segment=3'\nTry \"sbatch --help\" for more information\n",
            "unrecognized option '--segment=3'",
            ("launch", "slurm", "options"),
            "no such option",
        ),
        ("lua: talk to us first\n", "Slurm refuses the job: lua: talk to us first", (), "partool doctor"),
        ("", "it does not say why", (), "partool doctor"),
    ],
)
def test_refusals(text: str, words: str, path: tuple[str, ...], help: str) -> None:
    slurm = {"partition": "nope", "account": "ours", "gpu_type": "a100", "memory": "5T"}
    finding = refusal(text, launch_plan(slurm=slurm))
    assert finding.code == "PT551"
    assert words in finding.message
    assert finding.path == path
    assert help in finding.help


def file(state: str, **more: object) -> RunStatus:
    return RunStatus.model_validate({"state": state, "created": 1.0, **more})


def job(state: str, **more: object) -> SlurmJob:
    return SlurmJob(**{"job_id": "7", "task": None, "state": state} | more)  # type: ignore[arg-type]


ENDED = {"ended": 50.0, "started": 10.0, "attempt": 1}


@pytest.mark.parametrize(
    ("said", "known", "state", "reason"),
    [
        (file("queued"), job("PENDING", reason="Resources"), "queued", "waits for free nodes (Resources)"),
        (file("queued"), job("PENDING", reason="QOSMaxJobsPerUserLimit"), "queued", "a limit of the account"),
        (file("queued"), job("PENDING", reason="SomethingNew"), "queued", "SomethingNew"),
        (file("preempted", **ENDED), job("PENDING", reason="BeginTime"), "queued", "begin time"),
        (file("failed", **ENDED), job("REQUEUE_HOLD"), "queued", "held (REQUEUE_HOLD)"),
        (file("queued"), job("CONFIGURING"), "starting", "set up"),
        (file("queued"), job("RUNNING"), "starting", ""),
        (file("running", attempt=1), job("RUNNING"), "running", ""),
        (file("preempted", **ENDED), job("RUNNING", start=60.0), "starting", ""),
        (file("running", started=10.0, attempt=1), job("RUNNING", start=60.0, restarts=1), "starting", ""),
        (file("running", started=58.0, attempt=2), job("RUNNING", start=60.0, restarts=1), "running", ""),
        (file("failed", reason="rank 1", **ENDED), job("RUNNING", start=5.0), "running", "ending: failed, rank 1"),
        (file("done", **ENDED), job("COMPLETING", start=5.0), "done", ""),
        (file("running"), job("COMPLETED", exit=ExitCode(0, 0), end=70.0), "done", ""),
        (file("failed", reason="rank 1", **ENDED), job("FAILED", exit=ExitCode(9, 0)), "failed", "rank 1"),
        (file("queued"), job("FAILED", exit=ExitCode(78, 0)), "failed", "exit code 78: it would fail however often"),
        (file("running"), job("FAILED", exit=ExitCode(0, 9), reason="NonZeroExitCode"), "failed", "killed by SIGKILL"),
        (file("preempted", **ENDED), job("FAILED", exit=ExitCode(75, 0)), "preempted", "as often as allowed"),
        (file("running"), job("TIMEOUT", exit=ExitCode(0, 15)), "failed", "reached the job's time limit"),
        (file("running"), job("NODE_FAIL", exit=ExitCode(0, 0)), "failed", "a node failed"),
        (file("running"), job("OUT_OF_MEMORY", exit=ExitCode(0, 125)), "failed", "ran out of memory"),
        (file("running"), job("PREEMPTED", exit=ExitCode(0, 15)), "preempted", "preempted"),
        (file("queued"), job("CANCELLED", exit=ExitCode(0, 0)), "cancelled", ""),
        (file("done", exit_code=0, **ENDED), None, "done", ""),
        (file("running"), None, "failed", "Slurm no longer knows job 7"),
    ],
)  # fmt: skip
def test_status(tmp_path: Path, said: RunStatus, known: SlurmJob | None, state: str, reason: str) -> None:
    status = merged(said, known, tmp_path, "7")
    assert status.state == state
    assert reason in status.reason
    assert (status.ended is None) == status.active or known is None or known.end is None


def test_a_cancelled_run_and_its_requeues(tmp_path: Path) -> None:
    (tmp_path / "preemptions.count").write_text("2\n")
    (tmp_path / "failures.count").write_text("1\n")
    queued = merged(file("preempted", **ENDED), job("PENDING", reason="Priority"), tmp_path, "7")
    assert queued.reason == (
        "waits behind jobs of higher priority (Priority); requeued after preemption, 2 times; "
        "requeued after failures, 1 time"
    )
    (tmp_path / "cancel").touch()
    ended = merged(file("preempted", **ENDED), job("FAILED", exit=ExitCode(75, 0)), tmp_path, "7")
    assert (ended.state, ended.exit_code) == ("cancelled", 75)
    assert merged(file("queued"), None, tmp_path, "7").state == "cancelled"
    assert merged(file("running"), job("COMPLETED", exit=ExitCode(0, 0)), tmp_path, "7").state == "done"


def test_requeues_by_slurm_itself_count_as_preemptions(tmp_path: Path) -> None:
    (tmp_path / "restarts.count").write_text("7 1\n")
    for restarts, words in ((1, "queued"), (2, "queued; requeued after preemption, 1 time")):
        known = job("PENDING", reason="queued", restarts=restarts)
        assert merged(file("running"), known, tmp_path, "7").reason == words
    (tmp_path / "preemptions.count").write_text("1\n")
    known = job("PENDING", reason="queued", restarts=3)
    assert merged(file("running"), known, tmp_path, "7").reason == "queued; requeued after preemption, 3 times"
    (tmp_path / "restarts.count").write_text("6 1\n")  # of an earlier submission
    assert merged(file("running"), known, tmp_path, "7").reason == "queued; requeued after preemption, 1 time"


def test_the_line_of_a_jobs_output_that_says_why_is_told(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    output = tmp_path / "logs" / "slurm-7.out"
    output.write_text(
        "partool: note: preempted: Slurm has put the job back to the queue, as it does when a node fails\n"
        "step 7, loss 1.0\n"
        "partool: cannot start /opt/py/bin/python3 on node1\n"
        "srun: error: node1: task 0: Exited with exit code 78\n"
        "partool: note: failed (code 78)\n"
    )
    failed = job("FAILED", exit=ExitCode(78, 0))
    status = merged(file("queued"), failed, tmp_path, "7")
    assert status.reason == "cannot start /opt/py/bin/python3 on node1 (exit code 78)"
    assert merged(file("failed", reason="rank 1", **ENDED), failed, tmp_path, "7").reason == "rank 1"
    gone = merged(file("running"), None, tmp_path, "7")
    assert gone.reason.endswith("the last message in its output: cannot start /opt/py/bin/python3 on node1")
    output.write_text("step 1\nslurmstepd: error: execve(): srun: No such file or directory\nstep 2\n")
    words = "slurmstepd: error: execve(): srun: No such file or directory (exit code 2)"
    assert merged(file("queued"), job("FAILED", exit=ExitCode(2, 0)), tmp_path, "7").reason == words
    output.write_bytes(b"\xff\xfe" * 9)
    assert "exit code 2" in merged(file("queued"), job("FAILED", exit=ExitCode(2, 0)), tmp_path, "7").reason


def test_how_a_job_ended_is_kept(tmp_path: Path) -> None:
    """The end of a job is stored, since Slurm forgets jobs after minutes."""
    run = Run(tmp_path)
    write_status(tmp_path, file("running", attempt=3))
    assert run_status(run, job("TIMEOUT", exit=ExitCode(0, 15), end=70.0), "7").state == "failed"
    assert read_status(tmp_path).reason == "reached the job's time limit"
    later = run_status(run, None, "7")
    assert (later.state, later.reason, later.attempt) == ("failed", "reached the job's time limit", 3)


def test_an_array(tmp_path: Path) -> None:
    write_status(tmp_path, file("queued"))
    for index in range(3):
        (tmp_path / f"task-{index}").mkdir()
    write_status(tmp_path / "task-0", file("done", exit_code=0, **ENDED))
    write_status(tmp_path / "task-1", file("running", attempt=2, started=5.0))
    tasks = [
        job("COMPLETED", task=0, exit=ExitCode(0, 0)),
        job("RUNNING", task=1),
        job("PENDING", task=2, reason="JobArrayTaskLimit"),
    ]
    status = run_status(Run(tmp_path), None, "7", tasks)
    assert (status.state, status.attempt, status.started, status.ended) == ("running", 2, 5.0, None)
    waits = "waits for other tasks of the array (JobArrayTaskLimit)"
    assert status.reason == f"task 0: done; task 1: running; task 2: queued ({waits})"
    tasks[1:] = [job("FAILED", task=1, exit=ExitCode(9, 0)), job("COMPLETED", task=2, exit=ExitCode(0, 0))]
    ended = run_status(Run(tmp_path), None, "7", tasks)
    assert (ended.state, ended.exit_code) == ("failed", 9)
    assert ended.reason == "task 0: done; task 1: failed (exit code 9); task 2: done"
