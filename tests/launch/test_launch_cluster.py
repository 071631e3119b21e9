"""The commands against a fake scheduler in this file: what they submit, store, show and cancel."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import make_plan
from test_launch_commands import invoke

from partool.diagnostics.record import Diagnostic
from partool.launch.store import Run, RunStore
from partool.launch.submit import alone, submit_again, submit_new
from partool.launch.target import LaunchError, Level, LogLine, LogQuery, NoLogsError
from partool.plan.run import RunStatus, read_status, write_status
from partool.plan.types import Plan
from partool.render.job import Job, Rendered
from partool.render.render import render


class Scheduler:
    """A target that records its calls."""

    submitted: list[tuple[str, str]] = []
    states: dict[str, RunStatus] = {}
    fails: BaseException | None = None
    unreachable = False
    lines: Sequence[LogLine] = ()
    withdrawn: list[str] = []

    def check(self, plan: Plan) -> None:
        pass

    def validate(self, job: Job, rendered: Rendered, *, crds: Path | None = None, offline: bool = False) -> list[Level]:
        wrong = Diagnostic("PT585", "no such partition")
        own = Level("own rules", True, findings=(wrong,) if job.plan.name == "worse" else ())
        asked = Level("the scheduler", job.plan.name != "away", "22.05", (wrong,) if job.plan.name == "bad" else ())
        return [own] if offline else [own, asked]

    def submit(self, run: Run, job: Job, rendered: Rendered) -> dict[str, str]:
        assert {file: (run.path / file).read_text() for file in rendered.files} == rendered.files
        if self.fails is not None:
            raise self.fails
        self.submitted.append((run.id, rendered.text))
        self.states[run.id] = read_status(run.path)
        return {"job_id": str(len(self.submitted))}

    def withdraw(self, run: Run, details: dict[str, str]) -> None:
        self.withdrawn.append(details["job_id"])

    def status(self, run: Run) -> RunStatus:
        if self.unreachable:
            raise LaunchError("PT586", "the controller does not answer", exit_code=3)
        return self.states[run.id]

    def statuses(self, runs: Sequence[Run]) -> dict[str, RunStatus]:
        return {run.id: self.status(run) for run in runs}

    def cancel(self, run: Run, *, now: bool) -> bool:
        active = self.states[run.id].active
        self.states[run.id] = self.states[run.id].model_copy(update={"state": "cancelled"})
        return active

    def logs(self, run: Run, query: LogQuery) -> Iterator[LogLine]:
        if not self.lines:
            raise NoLogsError("nothing yet")
        yield from self.lines

    def errors(self, run: Run) -> str:
        return "rank 1: oh"

    def remove(self, run: Run) -> None:
        assert not self.states[run.id].active

    def diff(self, job: Job, rendered: Rendered) -> str:
        return "-old\n+new\n" if job.plan.name == "changed" else ""


@pytest.fixture(autouse=True)
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Scheduler]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTOOL_HOME", "home")
    monkeypatch.setattr("partool.launch.slurm.target.TARGET", Scheduler)
    for name, value in {
        "submitted": [],
        "states": {},
        "fails": None,
        "unreachable": False,
        "lines": (),
        "withdrawn": [],
    }.items():
        monkeypatch.setattr(Scheduler, name, value)
    return Scheduler


def slurm_plan(name: str = "dummy", **launch: Any) -> Plan:
    return make_plan(target="slurm", **launch).model_copy(update={"name": name})


def plan_file(name: str = "dummy", **launch: Any) -> str:
    Path("plan.json").write_text(slurm_plan(name, **launch).to_json())
    return "plan.json"


def new_job(plan: Plan) -> tuple[Job, Rendered]:
    from partool.launch.submit import job_of

    job = job_of(plan, RunStore().next_submitted(plan.name, plan.hash), (), {}, None)
    return job, render("slurm", job)


def tree() -> dict[str, str]:
    home = Path("home")
    return {str(path.relative_to(home)): path.read_text() for path in sorted(home.rglob("*")) if path.is_file()}


def test_ids_are_the_same_every_time_and_fit_a_label() -> None:
    long = "a" * 53
    first = RunStore().next_submitted(long, "0123456789abcdef")
    assert first.id == RunStore().next_submitted(long, "0123456789abcdef").id == "a" * 32 + "-01234567"
    ids = [first.id]
    for number in range(2, 4):
        RunStore().next_submitted(long, "0123456789abcdef").path.mkdir(parents=True)
        ids.append(RunStore().next_submitted(long, "0123456789abcdef").id)
        assert ids[-1] == f"{first.id}-{number}"
    assert max(map(len, ids)) <= 44
    assert {Run(Path(name)).name for name in ids} == {"a" * 32}
    digit = RunStore().next_submitted("7b-run", "0123456789abcdef")  # names of Services begin with a letter
    assert digit.id == "run-7b-run-01234567"
    assert digit.goes_by("7b-run")
    assert [run.id for run in RunStore().submitted(long, "0123456789abcdef")] == ids[:2]


def test_render_prints_what_launch_submits(scheduler: type[Scheduler]) -> None:
    printed = invoke("render", plan_file())
    assert printed.exit_code == 0
    answer = invoke("launch", "plan.json")
    assert answer.exit_code == 0
    [(run_id, text)] = scheduler.submitted
    assert printed.stdout == text
    run = RunStore().find(run_id)
    assert (run.path / "job.sbatch").read_text() == text
    assert Plan.from_json(run.plan_file.read_text()) == slurm_plan()
    submission = run.submission()
    assert submission is not None
    assert (submission.target, submission.main, submission.details) == ("slurm", "job.sbatch", {"job_id": "1"})
    assert f"run {run_id}" in answer.stderr
    assert "slurm job 1" in answer.stderr
    written = invoke("render", "plan.json", "-o", "out")
    assert written.stdout == ""
    assert sorted(path.name for path in Path("out").iterdir()) == ["job.sbatch", "node.sh", "plan.json"]
    spaced = invoke("render", "plan.json", "-o", "two words").stderr
    assert "by hand: mkdir -p " in spaced
    assert "cp -r 'two words'/. " in spaced
    assert spaced.rstrip().endswith("/job.sbatch")


def test_the_same_plan_is_not_submitted_twice_by_accident(scheduler: type[Scheduler]) -> None:
    assert invoke("launch", plan_file()).exit_code == 0
    second = invoke("launch", "plan.json")
    assert second.exit_code == 4
    assert "error[PT585]" in second.stderr
    assert len(scheduler.submitted) == 1
    assert invoke("launch", "plan.json", "--again").exit_code == 0
    scheduler.states = {run: status.model_copy(update={"state": "done"}) for run, status in scheduler.states.items()}
    assert invoke("launch", "plan.json").exit_code == 0
    first = scheduler.submitted[0][0]
    assert [run for run, _ in scheduler.submitted] == [first, f"{first}-2", f"{first}-3"]


@pytest.mark.parametrize(
    "error", [LaunchError("PT585", "refused"), OSError("disk"), KeyboardInterrupt(), ValueError("bug")]
)
def test_a_failed_submission_leaves_nothing(scheduler: type[Scheduler], error: BaseException) -> None:
    scheduler.fails = error
    job, rendered = new_job(slurm_plan())
    with pytest.raises(type(error)):
        submit_new(Scheduler(), job, rendered, "spec: 1\n")
    assert tree() == {}
    assert RunStore().runs() == []


def test_a_record_that_cannot_be_written_takes_the_job_back(
    scheduler: type[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, rendered = new_job(slurm_plan())
    write = Path.write_text

    def full(self: Path, *arguments: Any, **keywords: Any) -> int:
        if self.name == ".submission.json" and scheduler.submitted:
            raise OSError("no space left")
        return write(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        submit_new(Scheduler(), job, rendered, None)
    assert scheduler.withdrawn == ["1"]
    assert tree() == {}


def test_exit_code_of_a_failed_submission(scheduler: type[Scheduler]) -> None:
    scheduler.fails = LaunchError("PT585", "refused", "ask somebody")
    answer = invoke("launch", plan_file(slurm={"time": "60", "partition": "cpu"}))
    assert answer.exit_code == 4
    assert answer.stderr == "partool: checked by own rules\nerror[PT585]: refused\n  help: ask somebody\n"


def ended_run(scheduler: type[Scheduler]) -> Run:
    assert invoke("launch", plan_file()).exit_code == 0
    run = RunStore().runs()[0]
    ended = RunStatus(state="preempted", created=1.0, attempt=2, exit_code=75)
    write_status(run.path, ended)
    scheduler.states[run.id] = ended
    for name in ("cancel", "failures.count"):
        (run.path / name).write_text("2")
    return run


def test_resuming_submits_the_same_run_again(scheduler: type[Scheduler]) -> None:
    run = ended_run(scheduler)
    answer = invoke("launch", "--resume", run.id)
    assert answer.exit_code == 0, answer.stderr
    assert [name for name, _ in scheduler.submitted] == [run.id, run.id]
    assert scheduler.submitted[0] == scheduler.submitted[1]
    assert not (run.path / "cancel").exists()
    assert not (run.path / "failures.count").exists()
    assert (read_status(run.path).state, read_status(run.path).attempt) == ("queued", 2)
    again = invoke("launch", "--resume", run.id)
    assert again.exit_code == 4
    assert "PT504" in again.stderr


def test_a_failed_resume_leaves_the_run_as_it_was(scheduler: type[Scheduler]) -> None:
    run = ended_run(scheduler)
    before = tree()
    scheduler.fails = LaunchError("PT585", "refused")
    job, rendered = new_job(slurm_plan())
    with pytest.raises(LaunchError):
        submit_again(Scheduler(), run, Job(job.plan, run.id, job.run_dir), rendered, None)
    assert tree() == before


def test_a_run_is_resumed_by_one_launcher_at_a_time(scheduler: type[Scheduler]) -> None:
    run = ended_run(scheduler)
    with alone(run):
        answer = invoke("launch", "--resume", run.id)
    assert answer.exit_code == 4
    assert "PT504" in answer.stderr
    assert len(scheduler.submitted) == 1


def test_a_resumed_run_is_followed_from_its_new_attempt(
    scheduler: type[Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended_run(scheduler)  # after its second attempt
    answers = [RunStatus(state="queued", created=1.0, attempt=2), RunStatus(state="running", created=1.0, attempt=3)]
    seen: list[int] = []

    def status(self: Scheduler, run: Run) -> RunStatus:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def logs(self: Scheduler, run: Run, query: LogQuery) -> Iterator[LogLine]:
        seen.append(answers[0].attempt)
        answers[0] = RunStatus(state="done", created=1.0, attempt=3, exit_code=0)
        return iter([LogLine(0, False, b"step 1\n")])

    monkeypatch.setattr(
        Scheduler, "statuses", lambda self, runs: {r.id: RunStatus(state="failed", created=1.0) for r in runs}
    )
    monkeypatch.setattr(Scheduler, "remove", lambda self, run: None)
    monkeypatch.setattr(Scheduler, "status", status)
    monkeypatch.setattr(Scheduler, "logs", logs)
    answer = invoke("launch", "--resume", run.id, "--follow")
    assert answer.exit_code == 0, answer.stderr
    assert seen == [3]


def test_an_array_is_resumed_with_the_tasks_it_has(scheduler: type[Scheduler]) -> None:
    run = ended_run(scheduler)
    tasks = [slurm_plan().model_copy(update={"model_source": name}) for name in "ab"]
    for index, task in enumerate(tasks):
        folder = run.path / f"task-{index}"
        folder.mkdir()
        (folder / "plan.json").write_text(task.to_json())
        (folder / "preemptions.count").write_text("20")
    answer = invoke("launch", "--resume", run.id)
    assert answer.exit_code == 0, answer.stderr
    text = scheduler.submitted[-1][1]
    assert "#SBATCH --array=0-1" in text
    assert all(task.hash in text for task in tasks)
    assert not list(run.path.glob("task-*/preemptions.count"))
    scheduler.states[run.id] = scheduler.states[run.id].model_copy(update={"state": "failed"})
    other = invoke("launch", "plan.json", run.id, "--resume")
    assert other.exit_code == 1
    assert "PT587" in other.stderr


def test_dry_run_says_what_the_scheduler_says(scheduler: type[Scheduler]) -> None:
    good = invoke("launch", plan_file(), "--dry-run")
    assert good.exit_code == 0
    assert good.stdout == invoke("render", "plan.json").stdout
    assert "partool: the scheduler: passed (22.05)" in good.stderr
    bad = invoke("launch", plan_file("bad"), "--dry-run")
    assert bad.exit_code == 1
    assert "no such partition" in bad.stderr
    assert invoke("launch", plan_file("away"), "--dry-run").exit_code == 3
    assert (
        invoke("launch", plan_file("worse")).exit_code == 1
    )  # partool's own rules are checked before anything is sent
    assert scheduler.submitted == []
    assert tree() == {}


def test_diff() -> None:
    assert invoke("launch", plan_file(), "--diff").exit_code == 0
    changed = invoke("launch", plan_file("changed"), "--diff")
    assert (changed.exit_code, changed.stdout) == (10, "-old\n+new\n")


def test_status_list_and_cancel_ask_the_scheduler(scheduler: type[Scheduler]) -> None:
    invoke("launch", plan_file())
    run = RunStore().runs()[0]
    scheduler.states[run.id] = RunStatus(state="queued", created=1.0, reason="waits for resources")
    text = invoke("status", run.id)
    assert text.stdout.splitlines()[0] == f"{run.id}: queued (waits for resources)"
    assert "slurm: job id 1; submitted" in text.stdout
    assert json.loads(invoke("status", "--output", "json").stdout)["submission"]["details"] == {"job_id": "1"}
    assert "queued" in invoke("list").stdout
    assert invoke("logs", "--errors").stdout == "rank 1: oh\n"
    for state, said in {
        "queued": "took {id} out of the queue",
        "starting": "asked {id} to stop",
        "running": "asked {id} to stop after a checkpoint",
    }.items():
        scheduler.states[run.id] = RunStatus.model_validate({"state": state, "created": 1.0})
        answer = invoke("cancel", "last")
        assert (answer.exit_code, answer.stderr) == (0, f"partool: {said.format(id=run.id)}\n")
    assert invoke("cancel", "last").exit_code == 1


@pytest.mark.parametrize("code", [None, 0, 1, 75])
def test_a_run_that_is_cancelled_while_it_is_followed(
    scheduler: type[Scheduler], monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """The exit code shows the cancellation, whatever the run's state; no exit code is invented if there was none."""

    def logs(self: Scheduler, run: Run, query: LogQuery) -> Iterator[LogLine]:
        told = {"state": "cancelled", "reason": "cancelled", "started": 2.0, "ended": 5.0, "exit_code": code}
        self.states[run.id] = self.states[run.id].model_copy(update=told)
        return iter(())

    monkeypatch.setattr(Scheduler, "logs", logs)
    answer = invoke("launch", plan_file(), "--follow")
    assert answer.exit_code == 75
    assert ("exit code None" in answer.stderr, "  ended after 3 s" in answer.stderr) == (False, code is None)


def test_an_unreachable_scheduler(scheduler: type[Scheduler]) -> None:
    invoke("launch", plan_file())
    RunStore().create("local")
    scheduler.unreachable = True
    status = invoke("status", "dummy")
    assert status.exit_code == 3
    assert "the controller does not answer" in status.stderr
    listed = invoke("list")
    assert listed.exit_code == 0
    assert [line.split()[1] for line in listed.stdout.splitlines()] == ["starting", "unknown"]
    again = invoke("launch", "plan.json")  # whether the run is active cannot be known
    assert again.exit_code == 4


@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [("done", 0, 0), ("failed", 42, 5), ("failed", 78, 78), ("preempted", 75, 75), ("cancelled", None, 75)],
)
def test_follow(
    scheduler: type[Scheduler], monkeypatch: pytest.MonkeyPatch, state: Any, exit_code: Any, expected: int
) -> None:
    monkeypatch.setattr(Scheduler, "lines", [LogLine(1, False, b"step 1\n"), LogLine(None, True, b"srun: bad\n")])
    end = RunStatus(state=state, created=1.0, exit_code=exit_code)
    monkeypatch.setattr(Scheduler, "status", lambda self, run: end)
    answer = invoke("launch", plan_file(), "--follow")
    assert answer.exit_code == expected
    assert answer.stdout == "[1] step 1\n"
    assert "srun: bad\n" in answer.stderr


def test_options_that_do_not_go_together() -> None:
    plan_file()
    assert invoke("launch", "plan.json", "--detach").exit_code == 2
    assert invoke("render", "plan.json", "--target", "local", "--array", "training.seed=1").exit_code == 2
    refused = invoke("launch", "plan.json", "--at-once", "2")
    assert refused.exit_code == 2
    assert "--array" in refused.stderr
    here = invoke("launch", "plan.json", "--target", "local", "--follow")
    assert here.exit_code == 2
    assert "--follow is for clusters" in here.stderr
    assert "PT588" in invoke("launch", "plan.json", "--target", "torchrun").stderr
    Path("hand.json").write_text(make_plan(target="torchrun").to_json())
    by_hand = invoke("launch", "hand.json")
    assert by_hand.exit_code == 1
    assert "PT588" in by_hand.stderr


def test_a_dockerfile_for_the_machines_of_a_spec_that_has_no_image_yet() -> None:
    spec = "model: llama3-8b\nhardware: {{accelerator: {}, nodes: 2}}\ndata: python-stdlib\nlaunch: {{target: k8s}}\n"
    deploy = Path(__file__).parents[2] / "deploy"
    for accelerator, kind in (("h100-sxm", "cuda"), ("mi300x", "rocm"), ("gh200-96", "arm64")):
        Path("mine.yaml").write_text(spec.format(accelerator))
        answer = invoke("render", "mine.yaml", "--dockerfile")
        assert answer.exit_code == 0, answer.stderr
        assert answer.stdout == (deploy / f"Dockerfile.{kind}").read_text()
    own = invoke("render", "mine.yaml", "--dockerfile", "--base-image", "me/torch:1").stdout
    assert "me/torch:1" in own
    bad = invoke("render", "mine.yaml", "--dockerfile", "--base-image", "a\nRUN touch x")
    assert (bad.exit_code, bad.stdout) == (1, "")
    assert "cannot be written into a Dockerfile" in bad.stderr
    assert "no base image for ranks on a CPU" in invoke("render", plan_file(), "--dockerfile").stderr
    assert invoke("render", "plan.json", "--base-image", "x").exit_code == 2
