"""The Slurm target against fake commands (shell scripts): answers that do not come, or come late."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from _launch_case import launch_plan
from test_slurm_text import row

from partool.cli._runs import show_lines
from partool.launch.slurm import client as slurm_client
from partool.launch.slurm import logs as slurm_logs
from partool.launch.slurm.target import SlurmTarget
from partool.launch.store import Run, Submission
from partool.launch.submit import submit_new
from partool.launch.target import LaunchError, LogLine, LogQuery, NoLogsError
from partool.plan.run import RunStatus, write_status
from partool.render.job import Job
from partool.render.render import render

Play = Callable[..., None]
DEFAULTS = {
    "squeue": "",
    "scancel": "",
    "sbatch": "echo 7",
    "sacct": "echo 'sacct: error: Unable to contact slurm controller' >&2; exit 1",
}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return a function that replaces Slurm's commands by shell scripts; ``$calls`` records the calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))

    def put(**scripts: str) -> None:
        for name, script in (DEFAULTS | scripts).items():
            note = f'echo {name} "$@" >> {tmp_path}/calls\n'
            (folder / name).write_text(f"#!/bin/bash\n{note}{script}\n")
            (folder / name).chmod(0o755)

    return put


def job(tmp_path: Path) -> Job:
    return Job(launch_plan(), "llama-12345678", PurePosixPath(tmp_path / "home/runs/llama-12345678"))


def submit(tmp_path: Path) -> Run:
    order = job(tmp_path)
    return submit_new(SlurmTarget(), order, render("slurm", order), None)


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def submitted(tmp_path: Path, number: int, state: str = "running", cluster: str = "") -> Run:
    run = Run(tmp_path / f"home/runs/run-{number:08}")
    run.path.mkdir(parents=True)
    write_status(run.path, RunStatus.model_validate({"state": state, "created": 1.0}))
    details = {"job_id": str(number)} | ({"cluster": cluster} if cluster else {})
    record = Submission(target="slurm", submitted=1.0, main="job.sbatch", details=details)
    (run.path / "submission.json").write_text(record.model_dump_json())
    return run


def test_submission_to_another_cluster(tmp_path: Path, play: Play) -> None:
    play(sbatch="echo '7;tiger'")
    run = submit(tmp_path)
    submission = run.submission()
    assert submission is not None
    assert submission.details == {"job_id": "7", "cluster": "tiger"}
    assert calls(tmp_path) == [f"sbatch --parsable {run.path}/job.sbatch"]
    SlurmTarget().status(run)
    assert calls(tmp_path)[1].startswith("squeue --clusters=tiger ")


@pytest.mark.parametrize(
    ("script", "code", "exit_code", "words"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1", "PT551", 4, "qos"),
        (
            "echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller' >&2; exit 1",
            "PT550",
            3,
            "Unable to contact",
        ),
        ("rm $0; exec /nowhere/sbatch", "PT551", 4, "No such file"),
    ],
)
def test_a_submission_that_fails(
    tmp_path: Path, play: Play, script: str, code: str, exit_code: int, words: str
) -> None:  # fmt: skip
    play(sbatch=script)
    with pytest.raises(LaunchError, match=words) as caught:
        submit(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)
    assert len(calls(tmp_path)) == 1
    assert not (tmp_path / "home/runs/llama-12345678").exists()


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch is not in PATH") as caught:
        SlurmTarget().check(launch_plan())
    assert (caught.value.code, caught.value.exit_code) == ("PT550", 3)
    order = job(tmp_path)
    own, compared, tried = SlurmTarget().validate(order, render("slurm", order))
    assert (own.ran, compared.ran, tried.ran) == (True, False, False)
    assert "not in PATH" in compared.note
    assert "not in PATH" in tried.note


def test_a_dry_run_knows_limits_that_sbatch_lets_pass(tmp_path: Path, play: Play) -> None:
    """EnforcePartLimits is off by default: sbatch takes the job, which then waits for ever."""
    limits = "PartitionName=main Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 State=UP TotalNodes=3"
    nodes = "printf 'node%s|gpu:8|64|512000|idle\\n' 1 2 3"
    ok = "echo 'Job 9 to start at 2026-11-22T10:00:00 using 8 processors on nodes n1 in partition main' >&2"
    show = f'[ "$2" = config ] && echo "EnforcePartLimits = NO" || echo "{limits}"'
    play(sbatch=ok, scontrol=show, sinfo=nodes)
    for time_limit, codes in (("1-00:00:00", []), ("30-00:00:00", ["PT560"])):
        order = Job(launch_plan(slurm={"time": time_limit}), "llama-12345678", PurePosixPath(tmp_path / "runs/llama"))
        _, compared, tried = SlurmTarget().validate(order, render("slurm", order))
        assert (compared.ran, tried.ran, tried.findings) == (True, True, ())
        assert [finding.code for finding in compared.findings if finding.severity == "error"] == codes
    assert "launch.slurm.time is 30-00:00:00, the limit is 1-00:00:00" in compared.findings[0].message


def test_an_answer_without_a_number(tmp_path: Path, play: Play) -> None:
    """sbatch prints no job number: the job is found by the run's name."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    old = row(JobID="5", ArrayJobID="5", State="COMPLETED", Name="llama-12345678", SubmitTime="2026-01-01T00:00:00")
    new = row(JobID="9", ArrayJobID="9", State="PENDING", Name="llama-12345678", SubmitTime=now)
    other = row(JobID="10", ArrayJobID="10", State="PENDING", Name="llama", SubmitTime=now)
    (tmp_path / "queue").write_text(old + new + other)
    play(sbatch="echo welcome", squeue=f"cat {tmp_path}/queue")
    submission = submit(tmp_path).submission()
    assert submission is not None
    assert submission.details == {"job_id": "9"}


def test_a_launcher_killed_before_it_could_note_the_number(tmp_path: Path, play: Play) -> None:
    name = "run-00000007"
    (tmp_path / "queue").write_text(row(JobID="31", ArrayJobID="31", State="PENDING", Name=name, Reason="Resources"))
    play(squeue=f"cat {tmp_path}/queue")
    run = submitted(tmp_path, 7, "queued")
    record = run.submission()
    assert record is not None
    (run.path / "submission.json").write_text(record.model_copy(update={"details": {}}).model_dump_json())
    assert SlurmTarget().status(run).state == "queued"
    assert SlurmTarget().cancel(run, now=True)
    assert any(call.startswith("scancel") and call.endswith(" 31") for call in calls(tmp_path))


def test_a_job_whose_number_cannot_be_noted_is_taken_back(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play()
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if self.name == ".submission.json" and (tmp_path / "calls").exists():
            raise OSError("no space left")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        submit(tmp_path)
    assert calls(tmp_path)[-1] == "scancel 7"
    assert not (tmp_path / "home/runs/llama-12345678").exists()


def test_the_job_gets_the_users_locale(tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.delenv("SLURM_TIME_FORMAT", raising=False)
    play(sbatch=f"echo $LC_ALL $SLURM_TIME_FORMAT > {tmp_path}/seen; echo 7")
    submit(tmp_path)
    assert (tmp_path / "seen").read_text() == "de_DE.UTF-8\n"


def test_neither_answer_nor_queue(tmp_path: Path, play: Play) -> None:
    play(sbatch="echo welcome", squeue="echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    with pytest.raises(LaunchError, match="whether the job was taken is not known") as caught:
        submit(tmp_path)
    assert caught.value.code == "PT552"
    assert "scancel --name=llama-12345678" in caught.value.help


def test_an_interrupt_takes_the_job_back(tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    play()
    real = slurm_client.subprocess.run

    def run(command: list[str], **options: object) -> object:
        answer = real(command, **options)  # type: ignore[call-overload]
        if command[0] == "sbatch":
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(slurm_client.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path)
    assert calls(tmp_path)[1] == f"scancel --name=llama-12345678 --user={os.getuid()}"
    assert not (tmp_path / "home/runs/llama-12345678").exists()


def test_one_call_for_all_runs(tmp_path: Path, play: Play) -> None:
    runs = [submitted(tmp_path, number) for number in range(7, 12)] + [submitted(tmp_path, 20, cluster="tiger")]
    (tmp_path / "queue").write_text("".join(row(JobID=str(n), ArrayJobID=str(n)) for n in (7, 9, 20)))
    play(
        squeue=f"cat {tmp_path}/queue",
        sacct="echo '8|OUT_OF_MEMORY|0:125|Unknown|Unknown|Unknown|x'",
    )
    found = SlurmTarget().statuses(runs)
    assert {run_id[-2:]: status.state for run_id, status in found.items()} == {
        "07": "running", "08": "failed", "09": "running", "10": "failed", "11": "failed", "20": "running",
    }  # fmt: skip
    assert found["run-00000008"].reason == "the job ran out of memory"
    assert "no longer knows job 11" in found["run-00000011"].reason
    asked = [call for call in calls(tmp_path) if call.startswith("squeue")]
    assert len(asked) == 2
    assert asked[0].endswith("--jobs=7,8,9,10,11")


def test_a_hanging_controller(tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_client, "ANSWER_TIMEOUT_S", 0.3)
    play(squeue="exec sleep 30")
    with pytest.raises(LaunchError, match="squeue has not answered for") as caught:
        SlurmTarget().status(submitted(tmp_path, 7))
    assert caught.value.exit_code == 3


def test_cancel_of_somebody_elses_job(tmp_path: Path, play: Play) -> None:
    (tmp_path / "queue").write_text(row())
    play(
        squeue=f"cat {tmp_path}/queue",
        scancel="echo 'scancel: error: Kill job error on job id 7: Access/permission denied' >&2; exit 1",
    )
    with pytest.raises(LaunchError, match="permission denied") as caught:
        SlurmTarget().cancel(submitted(tmp_path, 7), now=False)
    assert caught.value.code == "PT553"


def test_cancel_goes_by_how_far_each_task_has_come(tmp_path: Path, play: Play) -> None:
    tasks = ["RUNNING", "PENDING", "COMPLETING", "COMPLETED", "RUNNING"]
    rows = [row(JobID=str(10 + n), ArrayTaskID=str(n), State=state) for n, state in enumerate(tasks)]
    (tmp_path / "queue-1").write_text("".join(rows))
    (tmp_path / "queue-2").write_text("".join([*rows[:2], row(JobID="12", ArrayTaskID="2", State="PENDING")]))
    play(squeue=f"cat {tmp_path}/queue-1; mv -f {tmp_path}/queue-2 {tmp_path}/queue-1 2>/dev/null; true")
    run = submitted(tmp_path, 7)
    assert SlurmTarget().cancel(run, now=False)
    assert (run.path / "cancel").exists()
    assert [call for call in calls(tmp_path) if call.startswith("scancel")] == [
        "scancel --batch --signal=USR2 7_0 7_4", "scancel 7_1", "scancel 7_2",
    ]  # fmt: skip


def test_logs_of_a_job_that_never_started_a_rank(tmp_path: Path, play: Play) -> None:
    play(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    run = submitted(tmp_path, 7, "failed")
    with pytest.raises(NoLogsError):
        list(SlurmTarget().logs(run, LogQuery()))
    (run.path / "logs").mkdir()
    (run.path / "logs/slurm-7.out").write_text("module: not found\npartool: plan.json is missing\n")
    lines = list(SlurmTarget().logs(run, LogQuery()))
    assert [(line.rank, line.is_error, line.text) for line in lines] == [
        (None, True, b"module: not found\n"),
        (None, True, b"partool: plan.json is missing\n"),
    ]
    (run.path / "logs/attempt-1").mkdir()
    (run.path / "logs/attempt-1/rank-0.stdout.log").write_text("step 1\n")
    write_status(run.path, RunStatus(state="failed", created=1.0, attempt=1))
    lines = list(SlurmTarget().logs(run, LogQuery()))
    assert [line.text for line in lines] == [b"partool: plan.json is missing\n", b"step 1\n"]
    with pytest.raises(NoLogsError, match="is no array"):
        list(SlurmTarget().logs(run, LogQuery(task=0)))


def array_of_two(tmp_path: Path) -> Run:
    """Return an array whose first task has written, and whose second one writes while it is followed."""
    run = submitted(tmp_path, 7, "queued")
    for index in range(2):
        folder = run.path / f"task-{index}"
        (folder / "logs/attempt-1").mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
        (folder / "logs/attempt-1/rank-0.stdout.log").write_text(f"step 1 of {index}\n")
        write_status(folder, RunStatus(state="running", created=1.0, started=2.0, attempt=1))
    (run.path / "logs").mkdir()
    (run.path / "logs/slurm-7_1.out").write_text("step 1 of 1\npartool: stopped\n")
    return run


def test_logs_of_an_array_name_its_tasks(tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    run = array_of_two(tmp_path)
    play(squeue=f"test -e {tmp_path}/over && {{ {gone}; }}; cat {tmp_path}/queue")
    rows = [row(JobID=str(7 + n), ArrayJobID="7", ArrayTaskID=str(n), State="RUNNING") for n in range(2)]
    (tmp_path / "queue").write_text("".join(rows))
    monkeypatch.setattr(slurm_logs, "_ASK_EVERY_S", 0.0)
    seen = []
    for line in SlurmTarget().logs(run, LogQuery(rank=0, follow=True)):
        seen.append((line.task, line.rank, line.text))
        if len(seen) == 2:  # both tasks have written: the first one writes more, and then both end
            with (run.path / "task-0/logs/attempt-1/rank-0.stdout.log").open("a") as log:
                log.write("step 2 of 0\n")
            (tmp_path / "over").touch()
    assert seen == [(0, 0, b"step 1 of 0\n"), (1, 0, b"step 1 of 1\n"), (0, 0, b"step 2 of 0\n")]
    read = [(line.task, line.rank, line.text) for line in SlurmTarget().logs(run, LogQuery())]
    assert read == [
        (0, 0, b"step 1 of 0\n"), (0, 0, b"step 2 of 0\n"), (1, None, b"partool: stopped\n"), (1, 0, b"step 1 of 1\n"),
    ]  # fmt: skip
    with pytest.raises(NoLogsError, match="rank 5"):
        list(SlurmTarget().logs(run, LogQuery(rank=5)))


def test_lines_of_an_array_are_marked(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = [LogLine(3, False, b"a\n", task=1), LogLine(None, False, b"b\n", task=0), LogLine(3, False, b"c\n")]
    show_lines(Run(tmp_path), lines, None)  # without a plan there may be several ranks
    show_lines(Run(tmp_path), lines, 3)
    marked = b"[task 1, rank 3] a\n[task 0] b\n[3] c\n" + b"[task 1] a\n[task 0] b\nc\n"
    assert capfdbinary.readouterr().out == marked
