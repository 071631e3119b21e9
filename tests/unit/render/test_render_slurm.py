"""Slurm scripts: golden texts, shellcheck, and their behaviour with a fake srun and scontrol."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from _launch_case import launch_job, launch_plan
from _slurm_stage import SRUN, Stage

from partool.plan.types import Plan
from partool.planner.rules.launching import environment
from partool.render.job import Job
from partool.render.render import findings, render
from partool.render.shell import UnsafeValueError, quote
from partool.render.slurm.lint import lint

GOLDEN = Path(__file__).parents[1] / "golden" / "slurm"
PYTHON = "/opt/train/bin/python"


def tasks() -> tuple[Plan, ...]:
    plan = launch_plan(1, 2, "cpu", "cpu", python=PYTHON)
    return tuple(plan.model_copy(update={"model_source": f"task {number}"}) for number in range(3))


def with_network(plan: Plan) -> Plan:
    return plan.model_copy(update={"environment": environment(plan.launch, plan.devices)})


def cases() -> dict[str, Job]:
    site = {"partition": "gpu", "account": "proj-1", "qos": "long", "time": "1-00:00:00", "gpu_type": "h100"}
    mounts = [{"source": "/scratch", "target": "/scratch"}, {"source": "/lustre/data", "target": "/data"}]
    image = "nvcr.io/nvidia/pytorch:26.08-py3"
    pyxis = {"container": "pyxis", "setup": "/sw/setup.sh", "options": {"switches": "1"}}
    secrets = {"HF_TOKEN": {"file": "/home/me/.hf"}}
    gh200 = launch_plan(2, 4, "gh200-96", network="slingshot", image=image, mounts=mounts, secrets=secrets, slurm=pyxis)
    shared = {"gpus": "gres", "exclusive": False, "memory": "900G", "cpus_per_task": 96}
    apptainer = {"image": "/images/train.sif", "slurm": shared | {"container": "apptainer"}}
    mi300x = launch_plan(1, 8, "mi300x", "rocm", restarts=3, mounts=mounts[1:], **apptainer)
    elastic = {"python": PYTHON, "min_nodes": 1, "restarts": 2}
    return {
        "cpu-1": launch_job(launch_plan(1, 2, "cpu", "cpu", python=PYTHON, requeues=0)),
        "h100-2-ib": launch_job(
            with_network(launch_plan(2, 8, network="ib", python=PYTHON, env={"NOTE": "it's\ntwo lines"}, slurm=site))
        ),
        "mi300x-apptainer": launch_job(mi300x),
        "gh200-pyxis": launch_job(with_network(gh200)),
        "array": launch_job(tasks()[0], tasks=tasks(), at_once=2),
        "elastic": launch_job(launch_plan(4, **elastic), sizes={n: launch_plan(n, **elastic) for n in (1, 2)}),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """PARTOOL_GOLDEN=write renews the texts; look at them before they are committed."""
    # A plan's hash covers every field of the plan: it would change with each new one.
    got = re.sub(r"\b[0-9a-f]{64}\b", "HASH", render("slurm", CASES[name]).text)
    file = GOLDEN / f"{name}.sbatch"
    if os.environ.get("PARTOOL_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(got, encoding="utf-8")
    assert got == file.read_text(encoding="utf-8")


def test_shellcheck_bash_and_own_rules_find_nothing(tmp_path: Path) -> None:
    files = []
    for name, job in CASES.items():
        for target in ("slurm", "torchrun"):
            for file, text in render(target, job).files.items():
                if file.endswith((".sbatch", ".sh")):
                    files.append(tmp_path / f"{name}-{target}-{file}")
                    files[-1].write_text(text)
                if file.endswith(".sbatch"):
                    assert lint(text) == []
    assert len(files) == 18
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, *files], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")
    for path in files:
        assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""


def test_files() -> None:
    rendered = render("slurm", CASES["array"])
    assert set(rendered.files) == {"job.sbatch", "node.sh", "plan.json"} | {f"task-{i}/plan.json" for i in range(3)}
    assert rendered.files["task-2/plan.json"] == CASES["array"].tasks[2].to_json()
    rendered = render("slurm", CASES["elastic"])
    assert set(rendered.files) == {"job.sbatch", "node.sh", "plan.json", "plan-1-nodes.json", "plan-2-nodes.json"}
    assert render("slurm", CASES["elastic"]) == rendered


def header(**launch: Any) -> list[str]:
    job = launch_job(launch_plan(2, 8, python=PYTHON, **launch))
    return [line for line in render("slurm", job).text.splitlines() if line.startswith("#SBATCH")]


def test_one_style_of_gpus() -> None:
    assert "#SBATCH --gpus-per-node=8" in header()
    assert "#SBATCH --gres=gpu:h100:8" in header(slurm={"gpus": "gres", "gpu_type": "h100"})
    assert not [line for line in header(slurm={"gpus": "none"}) if "gpu" in line]
    cpu = render("slurm", launch_job(launch_plan(2, 2, "cpu", "cpu"))).text
    assert "gpu" not in cpu
    assert "gpu-bind" not in render("slurm", CASES["h100-2-ib"]).text


def test_lead_time_memory_and_requeue() -> None:
    assert "#SBATCH --signal=B:USR2@190" in header(shutdown_timeout_s=100)
    assert "#SBATCH --signal=B:USR2@300" in header(slurm={"signal_lead_s": 300})
    assert "#SBATCH --mem=0" in header()
    assert not [line for line in header(slurm={"exclusive": False}) if "--mem" in line or "--exclusive" in line]
    assert "#SBATCH --requeue" in header(requeues=0, restarts=1)
    assert "#SBATCH --no-requeue" in header(requeues=0, restarts=0)


@pytest.mark.parametrize(
    ("image", "pyxis", "apptainer"),
    [
        ("nvcr.io/nvidia/pytorch:1", "nvcr.io#nvidia/pytorch:1", "docker://nvcr.io/nvidia/pytorch:1"),
        ("host:5000/a/b", "host:5000#a/b", "docker://host:5000/a/b"),
        ("team/train:2", "team/train:2", "docker://team/train:2"),
        ("nvcr.io#nvidia/pytorch:1", "nvcr.io#nvidia/pytorch:1", "docker://nvcr.io/nvidia/pytorch:1"),
        ("/images/a.sqsh", "/images/a.sqsh", "/images/a.sqsh"),
    ],
)
def test_names_of_images(image: str, pyxis: str, apptainer: str) -> None:
    for container, name in (("pyxis", f"--container-image={pyxis}"), ("apptainer", apptainer)):
        text = render("slurm", launch_job(launch_plan(1, image=image, slurm={"container": container}))).text
        assert quote(name) in text


def test_paths_that_slurm_cannot_be_given() -> None:
    plan = launch_plan(2, python=PYTHON)
    for folder in ('/a "b"', "/a\nb", "/a$(b)", "/a\\b"):
        job = launch_job(plan, run_dir=PurePosixPath(folder))
        assert [finding.code for finding in findings("slurm", job)] == ["PT549"]
        with pytest.raises(UnsafeValueError):
            render("slurm", job)
    job = launch_job(plan, run_dir=PurePosixPath("/ä b/100%j"))
    assert findings("slurm", job) == []
    assert '#SBATCH --output="/ä b/100%%j/logs/slurm-%j.out"' in render("slurm", job).text
    both = launch_job(plan, tasks=(plan,), sizes={1: launch_plan(1)})
    assert [finding.code for finding in findings("slurm", both)] == ["PT587"]
    with pytest.raises(ValueError, match="one size"):
        render("slurm", both)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def put(stage: Stage, nodes: int = 2, **launch: Any) -> Plan:
    plan = launch_plan(nodes, 2, "cpu", "cpu", python=stage.python, **launch)
    stage.put(render("slurm", launch_job(plan, run_dir=stage.run_dir)))
    return plan


def count(stage: Stage, name: str) -> str:
    file = stage.run / f"{name}.count"
    return file.read_text().strip() if file.exists() else ""


def test_the_step_and_the_agent(stage: Stage) -> None:
    plan = put(stage, env={"PATH": "/usr/bin:/bin", "nodes": "seven", "A": " 'x'\t\"$(y)\n"}, slurm={"setup": "setup"})
    (stage.folder / "setup").write_text('export FROM_SETUP="$#"; false\n')
    code, said = stage.play(RANK="3", MASTER_ADDR="elsewhere", PET_NNODES="9", NODE="1")
    assert (code, "setup ended with code 1" in said) == (0, True)
    step = stage.words("srun-arguments")
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--export=ALL"} <= set(step)
    run = str(stage.run)
    assert stage.words("agent-arguments") == [
        "-P", "-m", "partool_runtime.agent", f"{run}/plan.json", "--run-dir", run, "--resume",
        "--plan-hash", plan.hash, "--nodes", "2", "--node-rank", "1", "--rendezvous", "first:25000",
    ]  # fmt: skip
    got = stage.environment()
    assert {name: got[name] for name in plan.launch.env} == plan.launch.env
    key = got["PARTOOL_AGENT_KEY"]
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert not any(key in word for word in [*step, *stage.words("agent-arguments"), said])
    assert key not in (stage.run / "job.sbatch").read_text()
    assert stage.play(NODE="1")[0] == 0
    assert stage.environment()["PARTOOL_AGENT_KEY"] != key
    assert got["FROM_SETUP"] == "0"
    assert not {"RANK", "MASTER_ADDR", "PET_NNODES"} & set(got)


def test_wishes_of_an_outer_job_are_forgotten(stage: Stage) -> None:
    put(stage)
    left = {"SLURM_MEM_PER_CPU": "77", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_GPUS_PER_TASK": "1"}
    assert stage.play(**left)[0] == 0
    assert not set(left) & set(stage.environment())


def test_cores_of_the_smallest_node(stage: Stage) -> None:
    put(stage)
    assert stage.play(SLURM_JOB_CPUS_PER_NODE="48(x3),16,32(x2)")[0] == 0
    assert "--cpus-per-task=16" in stage.words("srun-arguments")


@pytest.mark.parametrize("signals", [[], [signal.SIGUSR2], [signal.SIGUSR2, signal.SIGTERM]], ids=len)
@pytest.mark.parametrize("code", [0, 1, 42, 75, 78])
def test_the_childs_code_is_kept(stage: Stage, code: int, signals: list[signal.Signals]) -> None:
    put(stage, restarts=2)
    stage.set(code=str(code))
    assert stage.signalled(signals)[0] == code
    preempted = code == 75 or (bool(signals) and code not in (0, 78))
    failed = not preempted and code not in (0, 78)
    assert (count(stage, "preemptions"), count(stage, "failures")) == ("1" * preempted, "1" * failed)
    assert stage.calls("requeue") == ["requeue 41000"] * (preempted or failed)


def test_a_signal_before_the_step_has_begun_is_passed_on(stage: Stage) -> None:
    put(stage)
    stage.set(slow="", wait="")
    process = stage.start()
    stage.wait_for("scontrol-calls")
    process.send_signal(signal.SIGUSR2)
    (stage.folder / "wait").unlink(missing_ok=True)
    process.communicate(timeout=30)
    # The step is signalled before it installs its handler, and dies of it, or it succeeds before the signal.
    assert process.returncode in (0, 128 + signal.SIGUSR2)
    assert count(stage, "preemptions") == ("1" if process.returncode else "")


@pytest.mark.parametrize(("code", "field", "file"), [(75, "requeues", "preemptions"), (1, "restarts", "failures")])
def test_requeues_are_counted_and_limited(stage: Stage, code: int, field: str, file: str) -> None:
    put(stage, **{"requeues": 0, "restarts": 0, field: 2})
    stage.set(code=str(code))
    texts = [stage.play() for _ in range(3)]
    assert [text[0] for text in texts] == [code] * 3
    assert len(stage.calls("requeue")) == 2
    assert count(stage, file) == "2"
    assert "1 of at most 2" in texts[0][1]
    assert "limit of 2 is reached" in texts[2][1]


def test_a_spoilt_count_ends_the_job(stage: Stage) -> None:
    put(stage)
    stage.set(code="75")
    (stage.run / "preemptions.count").write_text("$(touch canary)\n")
    assert stage.play()[0] == 78
    assert stage.calls("requeue") == []


def test_cancelled_runs_stay_away(stage: Stage) -> None:
    put(stage)
    stage.set(code="75", cancelled="")
    assert stage.play()[0] == 75
    (stage.folder / "cancelled").unlink()
    (stage.folder / "started").unlink()
    assert stage.play()[0] == 75  # cancelled while it was being requeued
    assert not (stage.folder / "started").exists()
    (stage.run / "cancel").unlink()
    for state in ("CANCELLED", "COMPLETING"):  # scancel, without partool
        stage.set(state=state)
        assert stage.play()[0] == 75
    assert stage.calls("requeue") == []


def test_a_job_that_cannot_be_requeued_ends_with_the_childs_code(stage: Stage) -> None:
    put(stage)
    stage.set(code="75", no_requeue="")
    code, said = stage.play()
    assert (code, "cannot put 41000 back" in said) == (75, True)


def test_requeues_by_slurm_itself_are_counted_as_preemptions(stage: Stage) -> None:
    """Slurm puts a job back when a node fails, and may kill the script before it counts that: the next start does."""
    put(stage, requeues=5, restarts=2)
    stage.set(code="1")
    assert stage.play()[0] == 1
    stage.set(code="0")
    assert stage.play(SLURM_RESTART_COUNT="1") == (0, "")  # after the script's own requeue
    assert (count(stage, "preemptions"), count(stage, "failures")) == ("", "1")
    for restarts, preemptions, announced in (("2", "1", True), ("2", "1", False), ("4", "3", True)):
        code, said = stage.play(SLURM_RESTART_COUNT=restarts)
        assert (code, count(stage, "preemptions"), count(stage, "failures")) == (0, preemptions, "1")
        assert ("partool: note: preempted: Slurm has put the job back" in said) == announced
    assert stage.play(SLURM_JOB_ID="42000") == (0, "")  # a new submission of the run begins at 0 again
    assert count(stage, "preemptions") == "3"


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "RUNNING Requeue=1 Restarts=1"])
def test_a_job_that_slurm_has_put_back_is_not_put_back_again(stage: Stage, state: str) -> None:
    put(stage, requeues=5, restarts=2)
    stage.set(code="1", state=state)
    code, said = stage.play()
    assert (code, stage.calls("requeue")) == (1, [])
    assert "partool: note: preempted: Slurm itself has put the job back to the queue" in said
    assert "cannot" not in said
    assert (count(stage, "preemptions"), count(stage, "failures")) == ("", "")  # its next start counts it
    stage.set(code="0", state="RUNNING")
    assert stage.play(SLURM_RESTART_COUNT="1")[0] == 0
    assert (count(stage, "preemptions"), count(stage, "failures")) == ("1", "")


@pytest.mark.parametrize("missing", ["plan.json", "node.sh"])
def test_missing_files_end_the_job_for_good(stage: Stage, missing: str) -> None:
    put(stage)
    (stage.run / missing).unlink()
    code, said = stage.play()
    assert (code, f"{missing} is missing on" in said) == (78, True)
    assert not (stage.folder / "started").exists()


def test_no_head_node_no_job(stage: Stage) -> None:
    put(stage)
    stage.set(no_hosts="")
    assert stage.play()[0] == 78
    put(stage, nodes=1)
    assert stage.play() == (0, "")
    assert "--rendezvous" not in stage.words("agent-arguments")


def test_what_the_node_cannot_do_ends_the_job(stage: Stage) -> None:
    put(stage, slurm={"setup": "/no/such/setup.sh"})
    code, said = stage.play()
    assert (code, "no /no/such/setup.sh on" in said) == (78, True)
    (stage.folder / "bin" / "agent").unlink()
    put(stage)
    code, said = stage.play()
    assert (code, "cannot start" in said) == (78, True)
    assert stage.play(SLURM_JOB_ID="")[0] == 78


def test_a_node_that_refuses_decides_whatever_srun_says_of_the_others(stage: Stage) -> None:
    put(stage, slurm={"setup": "/no/such/setup.sh"}, restarts=5)
    (stage.folder / "bin" / "srun").write_text(SRUN.replace("exec", "") + "exit 137\n")
    assert stage.play()[0] == 78
    assert stage.calls("requeue") == []
    put(stage, restarts=5)  # set up in the meantime: the earlier mark does not count
    assert stage.play()[0] == 137
    assert stage.calls("requeue") == ["requeue 41000"]


def test_array_tasks_have_folders_of_their_own(stage: Stage) -> None:
    plans = tuple(
        launch_plan(1, 2, "cpu", "cpu", python=stage.python).model_copy(update={"model_source": name}) for name in "ab"
    )
    stage.put(render("slurm", launch_job(plans[0], run_dir=stage.run_dir, tasks=plans)))
    stage.set(code="75")
    task = {"SLURM_ARRAY_JOB_ID": "40998", "SLURM_ARRAY_TASK_ID": "1"}
    assert stage.play(**task)[0] == 75
    words = stage.words("agent-arguments")
    folder = str(stage.run / "task-1")
    assert words[3:6] == [f"{folder}/plan.json", "--run-dir", folder]
    assert words[words.index("--plan-hash") + 1] == plans[1].hash
    assert stage.calls("requeue") == ["requeue 40998_1"]
    assert stage.calls("show job") == ["show job -o 40998_1"]  # querying the whole array would read other tasks' states
    assert (stage.run / "task-1" / "preemptions.count").read_text() == "1\n"
    (stage.run / "task-1" / "cancel").touch()
    assert stage.play(**task)[0] == 75
    assert len(stage.calls("requeue")) == 1
    assert stage.play(SLURM_ARRAY_JOB_ID="40998", SLURM_ARRAY_TASK_ID="2")[0] == 78


@pytest.mark.parametrize(("given", "taken"), [(1, 1), (2, 2), (3, 2), (4, 4), (5, 4)])
def test_elastic_jobs_take_the_largest_size_that_fits(stage: Stage, given: int, taken: int) -> None:
    plans = {n: launch_plan(n, 2, "cpu", "cpu", python=stage.python) for n in (1, 2, 4)}
    sizes = {n: plans[n] for n in (1, 2)}
    job = launch_job(plans[4], run_dir=stage.run_dir, sizes=sizes)
    assert "#SBATCH --nodes=1-4\n" in render("slurm", job).text
    stage.put(render("slurm", job))
    assert stage.play(SLURM_JOB_NUM_NODES=str(given)) == (0, "")
    words = stage.words("agent-arguments")
    assert words[3] == str(stage.run / ("plan.json" if taken == 4 else f"plan-{taken}-nodes.json"))
    assert words[words.index("--plan-hash") + 1] == plans[taken].hash
    assert f"--nodes={taken}" in stage.words("srun-arguments")
    assert ("--rendezvous" in words) == (taken > 1)


def test_apptainer_gets_what_the_run_needs(stage: Stage) -> None:
    data = stage.folder / "data"
    secret = {"HF_TOKEN": {"file": "/home/me/.hf"}}
    plan = launch_plan(1, 8, "mi300x", "rocm", image="/a b.sif", secrets=secret, slurm={"container": "apptainer"})
    plan = plan.model_copy(
        update={
            "data": plan.data.model_copy(update={"source": "/data/tokens/*.bin", "cache": str(data / "cache")}),
            "checkpoint": plan.checkpoint.model_copy(update={"dir": str(data / "checkpoints")}),
        }
    )
    stage.put(render("slurm", launch_job(plan, run_dir=stage.run_dir)))
    assert stage.play() == (0, "")
    words = stage.words("container-arguments")
    binds = [words[index + 1] for index, word in enumerate(words) if word == "-B"]
    own = [str(stage.run), str(data / "checkpoints"), str(data / "cache")]
    assert binds == [f"{path}:{path}" for path in own] + [f"{p}:{p}:ro" for p in ("/data/tokens", "/home/me/.hf")]
    assert words[:2] == ["exec", "--rocm"]
    assert words[words.index("-P") - 2 :][:2] == ["/a b.sif", "python"]
    assert (data / "cache").is_dir()


def test_commands_for_nodes_started_by_hand(stage: Stage) -> None:
    plan = launch_plan(3, 2, "cpu", "cpu", python=stage.python, env={"node": "x y"})
    stage.put(render("torchrun", launch_job(plan, run_dir=stage.run_dir)))
    assert stage.play("commands.sh", "2", "head-0")[0] == 0
    words = stage.words("agent-arguments")
    assert words[3] == str(stage.run / "plan.json")
    assert words[-8:] == ["--plan-hash", plan.hash, "--nodes", "3", "--node-rank", "2", "--rendezvous", "head-0:29500"]
    assert stage.environment()["node"] == "x y"
    assert stage.play("commands.sh", "1", PARTOOL_HEAD="h", PARTOOL_PORT="1234")[0] == 0
    assert stage.words("agent-arguments")[-1] == "h:1234"
    assert stage.play("commands.sh", "3", "head-0")[0] == 78
    code, said = stage.play("commands.sh", "0")
    assert (code != 0, "name of node 0" in said) == (True, True)
    assert words[5] == str(stage.run / ".partool" / "runs" / launch_job(plan).run_id)
    assert stage.play("commands.sh", "1", "h", PARTOOL_HOME="/shared home")[0] == 0
    assert stage.words("agent-arguments")[5] == f"/shared home/runs/{launch_job(plan).run_id}"
    bare = render("torchrun", launch_job(launch_plan(1, 2, "cpu", "cpu"), run_dir=stage.run_dir))
    assert str(stage.run_dir) not in bare.text
    assert sys.executable not in bare.text
    stage.put(bare)
    assert stage.play("commands.sh", PARTOOL_PYTHON=stage.python) == (0, "")
    stage.put(render("torchrun", launch_job(launch_plan(1, 2, "cpu", "cpu", python=stage.python))))
    assert stage.play("commands.sh") == (0, "")
    assert "--nodes" not in stage.words("agent-arguments")
