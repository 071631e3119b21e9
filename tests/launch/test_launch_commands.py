"""The commands about runs, without starting any."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from launch_helpers import make_plan
from layouts import laid
from typer.testing import CliRunner, Result

from partool.launch.checkpoints import complete, set_aside_after
from partool.launch.store import Run, RunStore
from partool.plan.layout import Mesh
from partool.plan.progress import RunProgress, write_progress
from partool.plan.run import RunStatus, rank_log, read_status, write_status
from partool.plan.validations import Validations, write_validations
from partool.spec.judging import BestSpec
from partool.spec.telemetry import TelemetrySpec, TrackerSpec
from partool.spec.training import CheckpointSpec, OptimizerSpec
from partool_runtime.agent.error_files import ErrorRecord, put_record


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTOOL_HOME", "home")
    return tmp_path


@pytest.fixture
def run() -> Run:
    run = RunStore().create("dummy")
    write_status(run.path, RunStatus(state="done", created=1.0, attempt=2, started=2.0, ended=65.0, exit_code=0))
    run.write_plan(make_plan(), "spec: 1\n")
    for attempt in (1, 2):
        for stream in ("stdout", "stderr"):
            file = rank_log(run.path, attempt, 1, stream)  # type: ignore[arg-type]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{stream} of attempt {attempt}\n")
    (run.path / "events").mkdir()
    event = {"v": 1, "kind": "step", "t": 1.0, "rank": 0, "data": {"step": 7, "loss": 2.5}}
    (run.path / "events" / "rank-0.jsonl").write_text(json.dumps(event) + '\n{"v": 1, "kind": "st')
    return run


def invoke(name: str, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(importlib.import_module(f"partool.cli.{name}").command)
    return CliRunner().invoke(app, arguments)


def plan_file(**changes: Any) -> str:
    file = Path("plan.json")
    file.write_text(make_plan().model_copy(update=changes).to_json())
    return str(file)


@pytest.mark.parametrize(
    ("note", "text"),
    [
        ({"step": 9, "step_at": 185.0}, "last step 3 min 5 s ago"),
        ({"step": 9, "step_at": 185.0, "phase": "saving"}, "last step 3 min 5 s ago, saving for 1 min 2 s"),
        ({"step": 0, "step_at": None, "phase": "compiling"}, "no step yet, compiling for 1 min 2 s"),
        ({"attempt": 1, "step": 9, "step_at": 185.0}, ""),  # of the attempt before
    ],
)
def test_how_long_ago_the_last_step_was(run: Run, note: dict[str, Any], text: str) -> None:
    """In status, list and top of a run that runs; not of one that has ended."""
    now = time.time()
    step_at = 0.0 if note["step_at"] is None else now - note["step_at"]
    told = {"attempt": 2, "phase": "training", "phase_at": now - 62.0} | note | {"step_at": step_at}
    write_progress(run.path, RunProgress(**told))
    assert "last step" not in invoke("status", "dummy").stdout + invoke("list").stdout
    write_status(run.path, RunStatus(state="running", created=1.0, attempt=2, started=2.0, host="elsewhere", pid=1))
    answers = [invoke(*command).stdout for command in (("status", "dummy"), ("list",), ("top", "dummy", "--once"))]
    for answer in answers:
        assert text in answer
        assert bool(text) == ("no step yet" in answer or "last step" in answer)
    data = json.loads(invoke("status", "--output", "json").stdout)
    assert data["last_step"]["step"] == note["step"]


def test_status(run: Run) -> None:
    answer = invoke("status", "dummy")
    assert answer.exit_code == 0
    assert answer.stdout.splitlines() == [
        f"{run.id}: done",
        "  exit code 0 after 1 min 3 s, 2 attempt(s)",
        "  step 7 of 1000, loss 2.5000",
        f"  home/runs/{run.id}",
    ]
    data = json.loads(invoke("status", "--output", "json").stdout)
    assert (data["id"], data["state"], data["progress"]["step"]) == (run.id, "done", 7)


def test_list(run: Run) -> None:
    RunStore().create("newer")
    lines = invoke("list").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["starting", "done"]
    assert [entry["name"] for entry in json.loads(invoke("list", "--output", "json").stdout)] == ["newer", "dummy"]


def test_logs(run: Run) -> None:
    latest = invoke("logs", "last", "--rank", "1", "--follow")
    assert (latest.stdout, latest.stderr) == ("stdout of attempt 2\n", "stderr of attempt 2\n")
    assert invoke("logs", "--rank", "1", "--attempt", "1").stdout == "stdout of attempt 1\n"
    missing = invoke("logs", "--rank", "0")
    assert missing.exit_code == 1
    assert "no logs of rank 0 in attempt 2" in missing.stderr
    merged = invoke("logs", "last")
    assert (merged.stdout, merged.stderr) == ("[1] stdout of attempt 2\n", "[1] stderr of attempt 2\n")
    assert "no errors on record" in invoke("logs", "--errors").stdout


def test_logs_of_a_run_that_waits_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = RunStore().create("waiting")
    queued = RunStatus(state="queued", created=1.0, reason="waits for free nodes (Resources)")
    monkeypatch.setattr("partool.launch.local.target.LocalTarget.status", lambda *_: queued)
    answer = invoke("logs", "waiting")
    assert answer.exit_code == 1
    assert answer.stderr.splitlines() == [
        f"error[PT502]: no logs yet: {waiting.id} has not started (queued: waits for free nodes (Resources))",
        f"  help: partool logs -f {waiting.id} waits for them",
    ]
    told = iter([queued, queued, queued.model_copy(update={"state": "done"}), queued])
    monkeypatch.setattr("partool.launch.local.target.LocalTarget.status", lambda *_: next(told))
    monkeypatch.setattr("partool.launch.store.Run.status", lambda *_: queued.model_copy(update={"state": "done"}))
    followed = invoke("logs", "-f", "waiting")
    assert followed.stderr.startswith(f"partool: {waiting.id} has not started (queued: waits for free nodes")


def test_errors_begin_with_what_the_agent_found_out(run: Run) -> None:
    """Ranks that lost their peer record it, and must not be blamed."""
    killed = "rank 2: killed by SIGKILL (often the kernel's out-of-memory killer)"
    write_status(run.path, RunStatus(state="failed", created=1.0, attempt=2, reason=killed))
    assert invoke("logs", "--errors").stdout.strip() == killed
    folder = run.path / "errors"
    folder.mkdir()
    messages = ["Connection closed by peer [10.0.0.1]:4512", "the disk is gone", "Connection reset by peer"]
    for rank, message in enumerate(messages):
        record = {"rank": rank, "attempt": 2, "time": 10.0 + rank, "type": "E", "message": message}
        record["traceback"] = f"E: {message}"
        (folder / f"rank-{rank}.json").write_text(json.dumps(record))
    lines = invoke("logs", "--errors").stdout.splitlines()
    assert lines[0] == killed
    assert [line.partition(",")[0] for line in lines if line.startswith("rank")][1:] == ["rank 1", "rank 0", "rank 2"]
    assert [line.endswith(" (noticed the end of another)") for line in lines if ", attempt 2, " in line] == [
        False, True, True,
    ]  # fmt: skip


def test_errors_of_an_earlier_attempt_begin_with_the_rank_that_was_killed(run: Run) -> None:
    killed = "killed by SIGKILL (often the kernel's out-of-memory killer)"
    lost = "Traceback\n" + "  line\n" * 40 + "Connection closed by peer"
    put_record(run.path, ErrorRecord(0, 1, 10.0, "RuntimeError", "Connection closed by peer", lost, 1))
    put_record(run.path, ErrorRecord(3, 1, 9.9, "", killed, "last words", -9))
    lines = invoke("logs", "--errors").stdout.splitlines()
    assert (lines[0].partition(",")[0], lines[1:3]) == ("rank 3", [killed, "last words"])
    assert "rank 0" in lines[4]


def test_render_says_what_to_do_with_the_files() -> None:
    """``launch`` refuses plans whose nodes somebody starts by hand."""
    assert (
        "partool: 2 file(s) in out; partool launch runs these commands"
        in invoke("render", plan_file(), "-o", "out").stderr
    )
    one = invoke("render", plan_file(), "--target", "torchrun", "-o", "one")
    assert one.stderr.endswith("partool: 2 file(s) in one\npartool: by hand: bash one/commands.sh\n")
    devices = make_plan().devices.model_copy(update={"nodes": 2, "per_node": 1})
    two = invoke("render", plan_file(devices=devices), "--target", "torchrun", "-o", "two folders")
    words = "NODE HEAD, on each node with its number from 0 to 1 and the name of node 0"
    assert two.stderr.endswith(f"partool: by hand: bash 'two folders'/commands.sh {words}\n")


def test_unknown_run() -> None:
    for name in ("status", "logs", "cancel"):
        answer = invoke(name, "nothing")
        assert answer.exit_code == 1
        assert "error[PT502]: no run 'nothing'" in answer.stderr


def test_cancel_signals_the_agent_or_says_why_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "PT508" in invoke("cancel", "dummy").stderr
    alive = RunStore().create("alive")  # by this very process
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("partool.launch.local.target.os.kill", lambda pid, number: sent.append((pid, number)))
    assert invoke("cancel", "alive").exit_code == 0
    assert invoke("cancel", alive.id, "--now").exit_code == 0
    assert sent == [(os.getpid(), number) for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)]


def test_cancel_leaves_other_machines_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    RunStore().create("far")
    monkeypatch.setattr("socket.gethostname", lambda: "here")  # the run was created under the machine's real name
    monkeypatch.setattr("partool.launch.local.target.os.kill", lambda pid, number: pytest.fail("a signal was sent"))
    answer = invoke("cancel", "far")
    assert answer.exit_code == 3
    assert "PT514" in answer.stderr


def test_dry_run_names_everything_and_does_nothing(run: Run) -> None:
    before = sorted(Path().rglob("*"))
    answer = invoke("launch", plan_file(launch=make_plan(env={"A": "b c"}).launch), "--dry-run")
    assert answer.exit_code == 0
    for part in ("-m partool_runtime.agent", "-m partool_runtime.worker", "OMP_NUM_THREADS=1", "A='b c'", "RANK=0..1"):
        assert part in answer.stdout
    again = invoke("launch", "plan.json", "--resume", "--dry-run").stdout
    assert f"home/runs/{run.id}/plan.json --run-dir" in again.replace(f"{Path.cwd()}/", "")
    assert again.count("--resume") == 2
    assert sorted(Path().rglob("*")) == sorted([*before, Path("plan.json")])


def checkpoints(run: Run, *steps: int) -> Path:
    folder = run.path / "checkpoints"
    for step in steps:
        (folder / f"step-{step:08d}").mkdir(parents=True)
    (folder / "step-00000099.tmp").mkdir(exist_ok=True)
    return folder


def test_an_earlier_step_sets_later_checkpoints_aside(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints(run, 10, 20, 30)
    (folder / "step-00000030.aside").mkdir()
    missing = invoke("launch", run.id, "--resume", "--step", "15")
    assert missing.exit_code == 1
    assert "error[PT509]: no checkpoint of step 15" in missing.stderr
    assert "steps 10, 20, 30" in missing.stderr
    dry = invoke("launch", run.id, "--resume", "--step", "20", "--dry-run").stdout
    assert "step-00000030  (kept aside)" in dry
    assert "step-00000020" not in dry
    assert len(list(folder.iterdir())) == 5
    seen: list[list[str]] = []

    def launch(*_: object, resume: bool, detach: bool) -> int:
        assert resume
        seen.append(sorted(entry.name for entry in folder.iterdir()))
        return 0

    monkeypatch.setattr("partool.launch.local.target.LocalTarget.launch", launch)
    assert invoke("launch", run.id, "--resume", "--step", "10").exit_code == 0
    wanted = ["step-00000010", "step-00000020.aside", "step-00000030.aside", "step-00000030.aside2"]
    assert seen == [[*wanted, "step-00000099.tmp"]]


def test_a_run_goes_on_from_its_best_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints(run, 10, 20, 30)
    unknown = invoke("launch", run.id, "--resume", "best")
    assert unknown.exit_code == 1
    assert "error[PT626]: no validation of a checkpoint" in unknown.stderr
    record = Validations()
    for step, loss in ((10, 3.0), (15, 1.0), (20, 2.0), (30, 2.5)):  # step 15 has no checkpoint
        record = record.noted(step, {"loss": loss})
    write_validations(folder, record)
    for words in (
        [run.id, "--resume", "best"],
        ["plan.json", "--resume", "best"],
        [run.id, "--resume", "--step", "best"],
    ):
        plan_file()
        dry = invoke("launch", *words, "--resume", "--dry-run").stdout
        assert "step-00000030  (kept aside)" in dry, words
        assert "step-00000020" not in dry
    monkeypatch.setattr("partool.launch.local.target.LocalTarget.launch", lambda *_, **options: 0)
    answer = invoke("launch", run.id, "--resume", "--step", "best")
    assert "goes on from step 20" in answer.stderr
    run.write_plan(make_plan().model_copy(update={"checkpoint": CheckpointSpec(best=BestSpec())}), None)
    assert "best loss 2 after step 20\n" in invoke("status", run.id).stdout
    (folder / "validations.json").write_text("[]")
    assert "error[PT626]" in invoke("launch", run.id, "--resume", "best").stderr


def test_setting_aside_begins_with_the_newest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints(run, 10, 20, 30, 40)
    rename, calls = Path.rename, 0

    def cut_off(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", cut_off)
    with pytest.raises(KeyboardInterrupt):
        set_aside_after(folder, 10)
    assert list(complete(folder)) == [10, 20]


def test_a_refused_plan_does_not_stay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partool.launch.local.target.LocalTarget.launch", lambda *_, **__: 78)
    before = run.plan_file.read_text()
    answer = invoke("launch", plan_file(kernels=make_plan().kernels.model_copy(update={"mode": "torch"})), "--resume")
    assert answer.exit_code == 78
    assert "keeps the plan it had" in answer.stderr
    assert run.plan_file.read_text() == before
    assert not (run.path / "plan-1.json").exists()


def test_folders_that_cannot_be_used_are_findings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.path / "status.json").write_bytes(b"\xff")
    assert "no readable status.json" in invoke("list").stdout
    monkeypatch.setenv("PARTOOL_HOME", plan_file())  # a file, not a folder
    answer = invoke("launch", "plan.json")
    assert answer.exit_code == 3
    assert "error[PT512]" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["plan.json", "--step", "3"], 2, "--step goes only together with --resume"),
        (["plan.json", "--resume", "--step", "-1"], 2, "a number of steps or best"),
        (["plan.json", "best"], 2, "only together with --resume"),
        (["plan.json", "--resume"], 1, "error[PT502]: there is no run of 'dummy'"),
        (["unknown", "--resume"], 1, "error[PT502]: no run 'unknown'"),
        (["plan.json", "last"], 2, "only together with --resume"),
        (["plan.json", "--set", "a=b"], 2, "--set changes a spec"),
        (["broken.json"], 1, "error[PT503]: broken.json is no plan of this version: Invalid JSON"),
        (["refused.json"], 1, "error[PT505]: the runtime cannot run this plan yet (PT401)"),
    ],
)
def test_refusals(arguments: list[str], exit_code: int, text: str) -> None:
    refused = {"runnable": False, "not_runnable": ("PT401",)}
    Path(plan_file(**refused)).rename("refused.json")
    Path("broken.json").write_text("{")
    plan_file()
    answer = invoke("launch", *arguments)
    assert answer.exit_code == exit_code
    assert text in answer.stderr
    assert not Path("home").exists()


def test_a_running_run_is_not_resumed() -> None:
    running = RunStore().create("dummy")
    answer = invoke("launch", plan_file(), "--resume")
    assert answer.exit_code == 4
    assert f"error[PT504]: {running.id} is running" in answer.stderr


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partool.launch.local.target.importlib.util.find_spec", lambda name: None)
    answer = invoke("launch", plan_file())
    assert answer.exit_code == 3
    assert "error[PT501]" in answer.stderr
    assert "pip install 'partool[train]'" in answer.stderr
    assert not Path("home").exists()


GPUS = make_plan().devices.model_copy(update={"accelerator": "h100-sxm", "backend": "cuda"})


@pytest.mark.parametrize(
    ("files", "machine", "refused"),
    [
        ((), ("cpu", 0), f"the plan is for {GPUS.per_node} x h100-sxm, and this machine has no accelerator"),
        (("kfd",), ("mi300x", 8), "and it has mi300x"),
        (("nvidia0",), ("h100-sxm", GPUS.per_node - 1), f"and this machine has {GPUS.per_node - 1}"),
        (("nvidia0",), ("h100-sxm", 8), ""),
        (("nvidia0",), ("h200-sxm", 8), ""),  # another device of the same kind may do
        (("dxg",), ("cpu", 0), ""),  # Windows below Linux: the driver lists its devices elsewhere
    ],
)
def test_devices_that_are_not_here_are_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[str, ...], machine: tuple[str, int], refused: str
) -> None:
    from partool.catalog import machine as here

    dev = tmp_path / "dev"
    dev.mkdir()
    for name in files:
        (dev / name).touch()
    found = here.Machine(*machine, cores=8, memory_bytes=2**33)
    monkeypatch.setattr(here, "this_machine", lambda: found)
    monkeypatch.setattr(here, "DEVICE_FOLDER", dev)
    started: list[str] = []
    monkeypatch.setattr(
        "partool.launch.local.target.LocalTarget.launch", lambda self, run, *_, **__: started.append(run.id) or 0
    )
    answer = invoke("launch", plan_file(devices=GPUS))
    assert answer.exit_code == (3 if refused else 0), answer.stderr
    assert ("error[PT513]" in answer.stderr) == bool(refused)
    assert refused in answer.stderr
    assert Path("home").exists() != bool(refused)
    assert len(started) == (0 if refused else 1)
    dry = invoke("launch", plan_file(devices=GPUS), "--dry-run")
    assert dry.exit_code == 0
    assert ("launch would refuse this here" in dry.stderr) == bool(refused)


@pytest.mark.parametrize(("code", "wanted"), [(0, 0), (75, 75), (78, 78), (1, 5), (-9, 5), (None, 0)])
def test_exit_codes_of_launch(monkeypatch: pytest.MonkeyPatch, code: int | None, wanted: int) -> None:
    seen: list[Any] = []

    def launch(self: object, run: Run, plan: object, stops: object, *, resume: bool, detach: bool) -> int | None:
        seen.append((run.id, resume, detach, read_status(run.path).state))
        return code

    monkeypatch.setattr("partool.launch.local.target.LocalTarget.launch", launch)
    assert invoke("launch", plan_file(), "--detach").exit_code == wanted
    created = RunStore().find("dummy")
    assert seen == [(created.id, False, True, "starting")]
    assert created.plan_file.read_text() == Path("plan.json").read_text()


def test_resume_goes_on_in_the_same_folder_with_a_new_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "partool.launch.local.target.LocalTarget.launch", lambda *_, **options: 0 if options["resume"] else 1
    )
    more = make_plan().training.model_copy(update={"steps": 2000})
    before = run.plan_file.read_text()
    trackers = TelemetrySpec(trackers=[TrackerSpec(name="wandb")], tags=["other"])  # hinder no resume
    assert invoke("launch", plan_file(training=more, telemetry=trackers), "--resume").exit_code == 0
    assert len(RunStore().runs()) == 1
    assert (run.path / "plan-1.json").read_text() == before
    assert '"steps": 2000' in run.plan_file.read_text()
    assert invoke("launch", run.id, "--resume").exit_code == 0  # with the run's existing plan
    assert not (run.path / "plan-2.json").exists()


def test_resume_says_from_where_and_what_is_laid_out_differently(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partool.launch.local.target.LocalTarget.launch", lambda *_, **options: 0)
    assert "partool: there is no checkpoint, so it begins anew\n" in invoke("launch", run.id, "--resume").stderr
    for step in (4, 10):
        (run.path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert "partool: goes on from step 10\n" in invoke("launch", run.id, "--resume").stderr
    assert "partool: goes on from step 4\n" in invoke("launch", run.id, "--resume", "--step", "4").stderr
    layout, model = make_plan().layout, make_plan().model.model_copy(update={"layers": 4})
    pipeline = {"schedule": "hanayo", "chunks": 2, "stages": ((0, 1), (1, 2), (2, 3), (3, 4))}
    other = laid(
        layout, mesh=Mesh(pp=2), accumulation=2, zero=layout.data.zero + 1, recompute=("none",) * 4, **pipeline
    )
    found = invoke("launch", plan_file(layout=other, model=model), "--resume").stderr
    (line,) = [line for line in found.splitlines() if "goes on from step 4" in line]
    zero = f"zero {layout.data.zero} -> {layout.data.zero + 1}"
    start = "partool: goes on from step 4; the layout changes: schedule none -> hanayo, stages 1 -> 4, pp 1 -> 2, "
    assert line.startswith(start)
    assert zero in line


def test_resume_says_how_the_learning_rate_changes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def resumed(steps: int, optimizer: OptimizerSpec) -> str:
        training = make_plan().training.model_copy(update={"steps": steps})
        return invoke("launch", plan_file(training=training, optimizer=optimizer), "--resume").stderr

    monkeypatch.setattr("partool.launch.local.target.LocalTarget.launch", lambda *_, **options: 0)
    (run.path / "checkpoints" / "step-00000500").mkdir(parents=True)
    optimizer, words = make_plan().optimizer, "the learning rate's schedule changes"
    assert make_plan().training.steps == 1000
    found = resumed(2000, optimizer)
    assert f"partool: goes on from step 500; {words} with training.steps 1,000 -> 2,000: " in found
    before, after, last = (optimizer.lr * (1 - 0.9 * fall) for fall in (0.5, 0.5 - 0.5 / 2**0.5, 1.0))
    step = re.search(r"step 501 has (\S+), not (\S+), and the last step (\S+)", found)
    assert step is not None
    assert [float(text) for text in step.groups()] == pytest.approx([after, before, last], rel=1e-2)
    assert words not in resumed(2000, optimizer)  # the run has this plan already
    constant = optimizer.model_copy(update={"schedule": optimizer.schedule.model_copy(update={"kind": "constant"})})
    assert f"{words}: step 501 has" in resumed(2000, constant)
    assert words not in resumed(3000, constant)


def test_a_stop_signal_as_the_run_is_announced_waits_for_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the signal ends the launcher, and the run is left behind as one whose agent is gone."""
    from partool.cli import _local

    waiting: list[list[int]] = []

    def announced(text: str, **options: Any) -> None:
        # Sent to this thread: a thread left by another test could take a signal sent to the process.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def started(target: Any, run: Run, plan: Any, stops: Any, **options: Any) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # once an agent is there to receive it
        waiting.append(list(stops.waiting))
        stops.waiting.clear()
        return 75

    monkeypatch.setattr(_local, "say", announced)
    monkeypatch.setattr(_local.LocalTarget, "launch", started)
    current, code = _local._start(make_plan(), "spec: 1\n", None, _local.LocalOptions())
    assert (waiting, code) == ([[signal.SIGINT]], 75)
    assert current.path.is_dir()
