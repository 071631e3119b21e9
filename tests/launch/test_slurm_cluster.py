"""Runs on a real Slurm through partool's commands: to the end, preempted, cancelled, failing, refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_helpers import wait_until
from layouts import laid
from slurm_cluster import Cluster
from slurm_runs import PATIENCE_S, Login, cluster_plan, output, processes_in, steps, wait_for_step

from partool.launch.store import Run
from partool.plan.run import rank_log
from partool.plan.types import Plan
from partool.spec.launch import LaunchSpec

pytestmark = pytest.mark.timeout(300)
STEPS, PER_NODE = 200, 1
LOW = {"partition": "low"}


@pytest.fixture(scope="module")
def login(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Login:
    return Login(slurm, tmp_path_factory.mktemp("login"))


@pytest.fixture(autouse=True)
def nothing_left(login: Login) -> Iterator[None]:
    """Every test leaves an empty queue."""
    yield
    for job in login.cluster.jobs():
        login.cluster.run("scancel", "--full", "--signal=KILL", job, check=False)
        login.cluster.run("scancel", job, check=False)
    wait_until(lambda: not login.cluster.jobs(), "an empty queue")


@pytest.fixture(scope="module")
def whole(login: Login) -> Run:
    """An undisturbed run on two nodes."""
    run = login.launch(cluster_plan(login.folder, STEPS, per_node=PER_NODE, slurm=LOW), "whole")
    early = login.status(run)
    assert early["state"] in ("queued", "starting", "running")
    wait_for_step(run, 1)
    assert login.status(run)["state"] == "running"
    followed = login.partool("logs", run.id, "--follow", "--rank", "0")
    assert f"step {STEPS}" in followed.stdout or str(STEPS) in followed.stdout
    login.wait(run, "done", "failed")
    return run


def test_to_the_end(login: Login, whole: Run) -> None:
    status = login.status(whole)
    assert (status["state"], status["exit_code"], status["attempt"]) == ("done", 0, 1), output(whole)
    assert status["submission"]["target"] == "slurm"
    assert status["progress"]["step"] == STEPS
    for rank in range(2 * PER_NODE):
        assert [number for number, _ in steps(whole.path, rank)] == list(range(1, STEPS + 1))
    lines = login.partool("logs", whole.id).stdout.splitlines()
    assert any(line.startswith("[0] ") for line in lines)
    listed = json.loads(login.partool("list", "--output", "json").stdout)
    assert {entry["id"]: entry["state"] for entry in listed}[whole.id] == "done"
    assert login.job(whole)["JobState"] in ("COMPLETED", "COMPLETING")
    assert login.partool("cancel", whole.id, code=1).stderr.startswith("error[PT508]")


@pytest.fixture(scope="module")
def elsewhere(login: Login) -> Run:
    """A run of the same training on this machine, without Slurm."""
    plan = cluster_plan(login.folder, STEPS, nodes=1, per_node=2 * PER_NODE)
    return login.launch(plan.model_copy(update={"launch": LaunchSpec()}), "elsewhere")


def preempt(login: Login, run: Run) -> None:
    """Make a job of another partition take the run's nodes for a second."""
    wait_for_step(run, 5)
    urgent = ["--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    login.cluster.run("sbatch", *urgent)
    queued = login.wait(run, "queued", "done", "failed")
    assert queued["state"] == "queued", output(run)
    assert "requeued after preemption, 1 time" in queued["reason"]


def test_preempted_and_resumed_exactly(login: Login, elsewhere: Run) -> None:
    """No step of the training is lost or repeated, and following the logs shows all of it."""
    run = login.launch(cluster_plan(login.folder, STEPS, per_node=PER_NODE, slurm=LOW), "preempted")
    with login.start("logs", run.id, "--follow", "--rank", "0") as follower:
        preempt(login, run)
        resumed = login.wait(run, "starting", "running", "done", "failed", "preempted", "cancelled")
        assert resumed["state"] in ("starting", "running"), output(run)
        done = login.wait(run, "done", "failed", "preempted", "cancelled")
        assert (done["state"], done["attempt"]) == ("done", 2), output(run)
        followed, _ = follower.communicate(timeout=PATIENCE_S)
    assert login.job(run)["Restarts"] == "1"
    assert len(steps(elsewhere.path)) == STEPS
    for rank in range(2 * PER_NODE):
        assert steps(run.path, rank) == steps(elsewhere.path, rank)
    assert followed == "".join(rank_log(run.path, attempt, 0, "stdout").read_text() for attempt in (1, 2))


@pytest.mark.long
def test_cancel(login: Login) -> None:
    """A cancelled run writes a checkpoint of the step it has reached, and is not requeued."""
    run = login.launch(cluster_plan(login.folder, 100_000, per_node=1, requeues=3), "cancelled")
    wait_for_step(run, 3)
    assert f"asked {run.id} to stop after a checkpoint" in login.partool("cancel", run.id).stderr
    status = login.wait(run, "cancelled", "failed", "done")
    assert status["state"] == "cancelled", output(run)
    last = steps(run.path)[-1][0]
    assert (run.path / f"checkpoints/step-{last:08}/manifest.json").exists()
    assert login.job(run)["Restarts"] == "0"
    assert processes_in(run.path) == []
    # and resumes from there
    again = login.partool("launch", "--resume", run.id, "--dry-run")
    assert again.stdout == (run.path / "job.sbatch").read_text()


@pytest.mark.long
def test_a_failing_rank(login: Login) -> None:
    """Its error and exit code reach the user; a failure that every retry would repeat is not restarted."""
    plan = cluster_plan(login.folder, 5, nodes=1, per_node=1, restarts=3)
    broken = plan.model_copy(update={"data": plan.data.model_copy(update={"source": ["/nowhere/text.txt"]})})
    run = login.launch(broken, "failing")
    status = login.wait(run, "failed", "done", "cancelled")
    assert (status["state"], status["exit_code"], status["attempt"]) == ("failed", 78, 1), output(run)
    assert "PT601" in status["reason"]
    job = login.job(run)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "78:0", "0")
    assert "'/nowhere/text.txt'" in login.partool("logs", run.id, "--errors").stdout
    assert "srun: error: node1: task 0: Exited with exit code 78" in login.partool("logs", run.id).stderr


@pytest.mark.long
def test_an_array(login: Login) -> None:
    spec = login.folder / "sweep.yaml"
    spec.write_text(
        "name: sweep\nmodel: {layers: 1, hidden: 16, heads: 2, vocab: 256}\n"
        "hardware: {accelerator: cpu, per_node: 1}\n"
        f"data: {{source: [{login.folder}/text.txt]}}\n"
        "training: {steps: 3, sequence_length: 16, global_batch: 2, log_every: 1}\n"
        "launch: {target: slurm, slurm: {exclusive: false, time: '10'}}\n"
    )
    cluster_plan(login.folder, 1)  # writes the text
    login.partool("launch", spec, "--array", "training.seed=1,2")
    run = login.newest("sweep")
    status = login.wait(run, "done", "failed", "cancelled")
    assert (status["state"], status["reason"]) == ("done", "task 0: done; task 1: done"), output(run)
    losses = [steps(run.path / f"task-{index}") for index in range(2)]
    assert [len(each) for each in losses] == [3, 3]
    assert losses[0] != losses[1]
    assert "1" in login.partool("logs", run.id, "--task", "1").stdout
    told = login.partool("logs", run.id).stdout.splitlines()
    assert {line.partition("] ")[0] for line in told} == {"[task 0", "[task 1"}
    assert login.partool("logs", run.id, "--follow", "--rank", "0").stdout.splitlines() == told
    assert "no task 2" in login.partool("logs", run.id, "--task", "2", code=1).stderr


def test_a_bad_partition_leaves_nothing(login: Login) -> None:
    before = sorted((login.folder / "home/runs").glob("*"))
    plan = cluster_plan(login.folder, 5, slurm={"partition": "nope"})
    answer = login.partool("launch", login.write(plan, "bad"), code=4)
    assert "error[PT551]" in answer.stderr
    assert "nope" in answer.stderr
    assert "sinfo -s" in answer.stderr
    assert sorted((login.folder / "home/runs").glob("*")) == before
    assert login.cluster.jobs() == []


@pytest.mark.parametrize(
    ("section", "nodes", "words"),
    [
        ({}, 2, "would start at"),
        ({"partition": "nope"}, 2, "launch.slurm.partition is nope"),
        ({}, 9, "hardware.nodes is 9"),
        ({"partition": "short", "time": "30"}, 1, "launch.slurm.time is 30"),
        ({"memory": "900G"}, 1, "900G of memory"),
        ({"options": {"segment": "2"}}, 2, "unrecognized option"),
    ],
)
def test_dry_run(login: Login, section: dict[str, object], nodes: int, words: str) -> None:
    file = login.write(cluster_plan(login.folder, 5, nodes=nodes, slurm=section), "dry")
    answer = login.partool("launch", file, "--dry-run", code=0 if "start" in words else 1)
    assert words in answer.stderr
    assert ("error[PT551]" in answer.stderr) == ("start" not in words)
    assert answer.stdout == login.partool("render", file).stdout
    assert login.cluster.jobs() == []


def test_waiting(login: Login) -> None:
    """A waiting job states its reason, is shown by list, and leaves the queue at once when cancelled."""
    plan = cluster_plan(login.folder, 5, slurm={"options": {"begin": "now+3600"}})
    follower = login.start("launch", str(login.write(plan, "waiting")), "--follow")
    wait_until(lambda: bool(login.cluster.jobs()), "the job")
    run = login.newest("waiting")
    wait_until(lambda: bool((record := run.submission()) and record.details), "the job's number on record")
    status = login.status(run)
    assert status["state"] == "queued"
    again = login.partool("launch", login.folder / "waiting.json", code=4)
    assert "error[PT585]" in again.stderr
    wait_until(lambda: "(BeginTime)" in login.status(run)["reason"], "the reason")
    assert "BeginTime" in login.partool("list").stdout
    assert f"took {run.id} out of the queue" in login.partool("cancel", run.id).stderr
    assert login.status(run)["state"] == "cancelled"
    _, told = follower.communicate(timeout=PATIENCE_S)
    assert (follower.returncode, "exit code None" in told) == (75, False), told
    assert login.cluster.jobs() == []
    assert login.partool("launch", login.folder / "waiting.json", "--diff").stdout == ""
    other = cluster_plan(login.folder, 5, slurm={"options": {"begin": "now+7200"}})
    diff = login.partool("launch", login.write(other, "waiting"), "--diff", code=10).stdout
    assert "-#SBATCH --begin=now+3600" in diff
    assert "+#SBATCH --begin=now+7200" in diff


def test_doctor(login: Login) -> None:
    def found(plan: Plan, code: int = 0) -> dict[str, tuple[str, str]]:
        answer = login.partool("doctor", login.write(plan, "doctor"), "--output", "json", code=code)
        return {check["name"]: (check["verdict"], check["text"]) for check in json.loads(answer.stdout)}

    good = found(cluster_plan(login.folder, 5))
    assert {name: verdict for name, (verdict, _) in good.items() if verdict == "failed"} == {}
    assert good["controller"] == ("ok", "partool answers")
    assert good["version"] == ("ok", login.cluster.run("sbatch", "--version").split()[1])
    assert good["preemption"][0] == "ok"
    assert good["partition"] == ("ok", "main: at most 1-00:00:00, 3 nodes")
    assert good["nodes"][1].startswith("3 node(s) with 4 cores or more are up")
    assert "would start at" in good["sbatch --test-only"][1]
    unfit = {"partition": "short", "container": "pyxis"}
    bad = found(cluster_plan(login.folder, 5, nodes=9, slurm=unfit, image="example.org/partool:1"), code=3)
    assert {name for name, (verdict, _) in bad.items() if verdict == "failed"} == {
        "partition", "nodes", "pyxis", "sbatch --test-only",
    }  # fmt: skip
    script = login.folder / "mine.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=9\nsrun train\n#SBATCH --time=1\n")
    own = login.partool("doctor", script, code=3).stdout
    assert "Node count specification invalid" in own
    assert "script PT5" in own


def shadowed(login: Login, monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Login:
    """Return a login node where sbatch is a script; ``$real`` is the real one."""
    shadow = folder / "bin"
    shadow.mkdir()
    (shadow / "sbatch").write_text(f"#!/bin/bash\nreal={login.cluster.bin}/sbatch\n{script}\n")
    (shadow / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{shadow}:{login.environment['PATH']}")
    monkeypatch.setenv("PARTOOL_HOME", str(folder / "home"))
    return login


@pytest.mark.parametrize("submits", [True, False])
def test_an_answer_that_is_lost(
    login: Login, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, submits: bool
) -> None:
    """sbatch hangs after, or before, the controller has taken the job: it is adopted, or no job is left."""
    from partool.launch.slurm import target
    from partool.launch.submit import job_of, submit_new
    from partool.launch.target import LaunchError
    from partool.render.render import render

    shadowed(login, monkeypatch, tmp_path, ('"$real" "$@"; ' if submits else "") + "exec sleep 60")
    monkeypatch.setattr(target, "_SUBMIT_TIMEOUT_S", 1.0)
    plan = cluster_plan(tmp_path, 5, slurm={"options": {"begin": "now+3600"}})
    job = job_of(plan, Run(tmp_path / f"home/runs/{'lost' if submits else 'none'}-12345678"), (), {}, None)
    if not submits:
        with pytest.raises(LaunchError, match="has not answered") as caught:
            submit_new(target.SlurmTarget(), job, render("slurm", job), None)
        assert caught.value.exit_code == 3
        assert login.cluster.jobs() == []
        assert list((tmp_path / "home/runs").iterdir()) == []
        return
    run = submit_new(target.SlurmTarget(), job, render("slurm", job), None)
    assert login.cluster.jobs() == [login.job_id(run)]
    assert target.SlurmTarget().status(run).state == "queued"


def test_settings_of_another_job_do_not_reach_this_one(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SBATCH_PARTITION": "short", "SBATCH_TIMELIMIT": "3", "SBATCH_WAIT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "3")
    held = {"options": {"begin": "now+3600"}}
    start = time.monotonic()
    named = login.launch(cluster_plan(login.folder, 5, nodes=1, slurm=held | {"partition": "main"}), "named")
    unnamed = login.launch(cluster_plan(login.folder, 5, nodes=1, slurm=held | {"time": "4"}), "unnamed")
    assert time.monotonic() - start < PATIENCE_S / 2
    assert (login.job(named)["Partition"], login.job(named)["TimeLimit"]) == ("main", "00:10:00")
    assert (login.job(unnamed)["Partition"], login.job(unnamed)["TimeLimit"]) == ("short", "00:04:00")


def failing_rank(folder: Path) -> dict[str, str]:
    """Return variables with which rank 1 ends with exit code 9 as its interpreter starts."""
    place = folder / "broken"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1': os._exit(9)\n")
    return {"PYTHONPATH": str(place)}


@pytest.mark.long
def test_restarts_up_to_the_limit(login: Login) -> None:
    plan = cluster_plan(login.folder, 5, per_node=1, restarts=1, env=failing_rank(login.folder))
    run = login.launch(plan, "restarted")
    login.wait(run, "queued")
    status = login.wait(run, "failed", "done", "cancelled")
    assert (status["state"], status["exit_code"], status["attempt"]) == ("failed", 1, 2), output(run)
    assert "rank 1" in status["reason"]
    assert (login.job(run)["ExitCode"], login.job(run)["Restarts"]) == ("1:0", "1")
    assert (run.path / "failures.count").read_text().strip() == "1"
    assert "the limit of 1 is reached" in login.partool("logs", run.id).stderr


@pytest.mark.long
def test_the_same_failure_ends_the_run(login: Login) -> None:
    env = failing_rank(login.folder)
    plan = cluster_plan(login.folder, 5, per_node=1, restarts=9, same_failure=2, env=env)
    run = login.launch(plan, "same")
    status = login.wait(run, "failed", "done", "cancelled")
    assert (status["state"], status["exit_code"], status["attempt"]) == ("failed", 78, 2), output(run)
    assert login.job(run)["Restarts"] == "1"


@pytest.mark.long
def test_a_node_fails(login: Login, whole: Run) -> None:
    """The job starts again on the nodes that are left, from the last checkpoint, with the same result."""
    plan = cluster_plan(login.folder, STEPS, per_node=PER_NODE, slurm=LOW | {"exclude": "node3"}, restarts=2)
    plan = plan.model_copy(update={"checkpoint": plan.checkpoint.model_copy(update={"every": 5})})
    run = login.launch(plan, "orphaned")
    wait_for_step(run, 7)
    login.cluster.stop_node("node2")
    try:
        login.wait(run, "queued")
    finally:
        login.cluster.start_node("node2")
    done = login.wait(run, "done", "failed", "cancelled")
    login.cluster.wait_ready()
    assert (done["state"], done["attempt"]) == ("done", 2), output(run)
    assert dict(steps(run.path)) == dict(steps(whole.path))
    assert (run.path / "preemptions.count").read_text() == "1\n"  # Slurm's own requeue
    assert "preempted: Slurm has put the job back" in output(run)
    assert "scontrol cannot" not in output(run)


@pytest.mark.long
def test_the_time_limit(login: Login) -> None:
    """Before its time limit the run writes a checkpoint, and it resumes after the requeue."""
    plan = cluster_plan(
        login.folder, 100_000, per_node=1, slurm={"time": "1", "signal_lead_s": 30}, shutdown_timeout_s=10
    )
    run = login.launch(plan, "timed")
    wait_for_step(run, 1)
    status = login.wait(run, "queued", "failed", "done")
    assert status["state"] == "queued", output(run)
    last = steps(run.path)[-1][0]
    wait_for_step(run, last + 2)
    numbers = [number for number, _ in steps(run.path)]
    assert numbers == list(range(1, len(numbers) + 1))
    login.partool("cancel", run.id, "--now")
    assert login.wait(run, "cancelled", "queued", "failed")["state"] == "cancelled"
    assert processes_in(run.path) == []


@pytest.mark.long
def test_scancel_by_hand(login: Login) -> None:
    run = login.launch(cluster_plan(login.folder, 100_000, nodes=1, per_node=1, requeues=3, restarts=3), "by-hand")
    wait_for_step(run, 1)
    login.cluster.run("scancel", login.job_id(run))
    status = login.wait(run, "cancelled", "queued", "failed")
    assert status["state"] == "cancelled", output(run)
    assert login.job(run)["Restarts"] == "0"


@pytest.mark.long
def test_fewer_nodes(login: Login) -> None:
    """With a node down, an elastic run starts on the remaining nodes."""
    plan = cluster_plan(login.folder, STEPS, nodes=3, per_node=1, min_nodes=2)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"global_batch": 12})})
    layout = laid(plan.layout, accumulation=2)
    login.cluster.stop_node("node3")
    login.cluster.run("scontrol", "update", "nodename=node3", "state=down", "reason=test")
    try:
        run = login.launch(plan.model_copy(update={"layout": layout}), "elastic")
        status = login.wait(run, "done", "failed", "cancelled")
    finally:
        login.cluster.start_node("node3")
        login.cluster.run("scontrol", "update", "nodename=node3", "state=resume", check=False)
        login.cluster.wait_ready()
    assert status["state"] == "done", output(run)
    assert [len(steps(run.path, rank)) for rank in range(3)] == [STEPS, STEPS, 0]


@pytest.mark.long
def test_preemption_with_sigterm_alone(login: Login, whole: Run, tmp_path: Path) -> None:
    """If the site does not send a job's own signal at preemption, SIGTERM has the same effect."""
    with Cluster(signal_at_preemption=False) as cluster:
        plain = Login(cluster, tmp_path)
        (tmp_path / "text.txt").write_text((login.folder / "text.txt").read_text())
        run = plain.launch(cluster_plan(tmp_path, STEPS, per_node=PER_NODE, slurm=LOW), "preempted")
        preempt(plain, run)
        done = plain.wait(run, "done", "failed", "preempted", "cancelled")
        assert done["state"] == "done", output(run)
    for rank in range(2 * PER_NODE):
        assert steps(run.path, rank) == steps(whole.path, rank)
