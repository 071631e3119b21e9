"""Scripts that make other training systems train a plan: run with stand-ins for torchrun, srun and scontrol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
import typer
import yaml
from planned import plan_of
from typer.testing import CliRunner

from partool.cli import plan as plan_command
from partool.cli import render as render_command
from partool.engines.megatron import settings
from partool.engines.shell import Word
from partool.engines.write import WRITABLE, terms_of
from partool.plan.types import Plan
from partool.render.job import Job
from partool.render.program import program
from partool.render.render import findings, render

SPEC = """
spec: 1
engine: ENGINE
name: my-run
model: qwen3-0.6b
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 4}
training: {sequence_length: 2048, global_batch: 64, precision: bf16, steps: 30}
data: {source: python-stdlib}
launch: {target: TARGET, image: "team/train:1", env: {NOTE: "it's $HOME"}, slurm: {partition: gpu, time: "01:00:00"}}
"""
TOLD = '#!/bin/bash\nfor word in "$@"; do printf "%s\\0" "$word"; done > "$LOG"; env -0 > "$LOG.env"\n'
SRUN = '#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\nSLURM_NODEID=1 exec "$@"\n'


@cache
def planned(engine: str) -> Plan:
    """Return the plan for an engine, made once."""
    return plan_of(SPEC.replace("ENGINE", engine).replace("TARGET", "torchrun").replace('image: "team/train:1", ', ""))


def job_for(engine: str, target: str, folder: Path, note: str = "it's $HOME", **env: str) -> Job:
    """Return the job of a plan for an engine; ``env`` are further variables of the spec."""
    plan = planned(engine)
    image = "team/train:1" if target == "k8s" else None
    launch = plan.launch.model_copy(update={"target": target, "image": image, "env": {"NOTE": note, **env}})
    plan = plan.model_copy(update={"launch": launch})
    return Job(plan, "my-run-1", PurePosixPath(folder), program=program(plan))


def play(folder: Path, *command: str, **env: str) -> tuple[list[str], dict[str, str]]:
    """Run a command with stand-ins in PATH; return the words that torchrun was given, and its environment."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (
        ("torchrun", TOLD),
        ("accelerate", TOLD),
        ("srun", SRUN),
        ("scontrol", "#!/bin/bash\nprintf 'first\\nsecond\\n'\n"),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    log = folder / "log"
    path = f"{tools}:{os.environ['PATH']}"
    done = subprocess.run(
        command, env={"PATH": path, "LOG": str(log), "HOME": str(folder), **env}, cwd=folder, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pairs = (log.with_name("log.env")).read_text().split("\0")
    return log.read_text().split("\0")[:-1], dict(pair.partition("=")[::2] for pair in pairs if pair)


def put(job: Job, folder: Path, target: str) -> str:
    """Write the rendered files; return the main one."""
    rendered = render(target, job)
    for name, text in rendered.files.items():
        (folder / name).write_text(text)
    return rendered.main


@pytest.mark.parametrize("engine", WRITABLE)
def test_the_script_starts_the_ranks_of_a_node(engine: str, tmp_path: Path) -> None:
    job = job_for(engine, "torchrun", tmp_path)
    assert put(job, tmp_path, "torchrun") == "train.sh"
    node = {"NODE_RANK": "1", "MASTER_ADDR": "first", "SCRIPT": "own.py"}
    words, env = play(tmp_path, "bash", "train.sh", "mine.py", "--more", "it's", **node)
    assert env["NOTE"] == "it's $HOME"
    if engine == "accelerate":
        meet = ["--machine_rank", "1", "--main_process_ip", "first", "--main_process_port", "29500", "own.py"]
        assert words[: 3 + len(meet)] == ["launch", "--config_file", str(tmp_path / "accelerate.yaml"), *meet]
        assert words[-3:] == ["mine.py", "--more", "it's"]
        assert yaml.safe_load((tmp_path / "accelerate.yaml").read_text())["num_processes"] == 8
        return
    meet = ["--node_rank", "1", "--master_addr", "first", "--master_port", "29500"]
    launcher = ["--nproc_per_node", "4", "--nnodes", "2", *meet]
    assert words[: len(launcher)] == launcher
    rest = words[len(launcher) :]
    if engine == "deepspeed":
        config = tmp_path / "ds_config.json"
        assert rest == ["mine.py", "--more", "it's", "--deepspeed_config", str(config)]
        assert json.loads(config.read_text())["train_batch_size"] == 64
    elif engine == "torchtitan":
        config = tmp_path / "job.toml"
        own = ["-m", "torchtitan.train", "--job.config_file", str(config)]
        assert rest == [*own, "mine.py", "--more", "it's"]
        assert tomllib.loads(config.read_text())["training"]["global_batch_size"] == 64
    else:
        assert rest[0] == "own.py"
        assert rest[-3:] == ["mine.py", "--more", "it's"]
        given = settings([Word(word, "", 1) for word in rest])
        for term in terms_of(job.plan).terms:
            assert str(given[term.name].value) == str(term.value)


@pytest.mark.parametrize("engine", WRITABLE)
def test_slurm_starts_the_script_on_every_node(engine: str, tmp_path: Path) -> None:
    job = job_for(engine, "slurm", tmp_path)
    assert findings("slurm", job) == []
    main = put(job, tmp_path, "slurm")
    slurm = {"SLURM_JOB_ID": "12001", "SLURM_JOB_NODELIST": "first,second", "SLURM_JOB_CPUS_PER_NODE": "16(x2)"}
    words, env = play(tmp_path, "bash", main, "mine.py", SCRIPT="own.py", **slurm)
    assert words[words.index("first") - 2 : words.index("20001") + 1 : 2] == ["1", "first", "20001"]
    assert "mine.py" in words
    assert env["NOTE"] == "it's $HOME"
    text = (tmp_path / main).read_text()
    assert "#SBATCH --partition=gpu" in text
    assert "#SBATCH --no-requeue" in text
    assert "--signal" not in text
    assert "# Words behind job.sbatch" in (tmp_path / "train.sh").read_text()


@pytest.mark.parametrize("engine", WRITABLE)
def test_scripts_pass_shellcheck(engine: str, tmp_path: Path) -> None:
    job = job_for(engine, "slurm", tmp_path, "plain")
    put(job, tmp_path, "slurm")
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run(
        [shellcheck, tmp_path / "job.sbatch", tmp_path / "train.sh"], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed"])
def test_the_spec_may_name_the_script(engine: str, tmp_path: Path) -> None:
    put(job_for(engine, "torchrun", tmp_path, SCRIPT="/opt/own.py"), tmp_path, "torchrun")
    words, _ = play(tmp_path, "bash", "train.sh")
    assert "/opt/own.py" in words
    words, _ = play(tmp_path, "bash", "train.sh", "--lr", "1e-4")
    rest = words[words.index("/opt/own.py") :]
    assert rest[rest.index("--lr") + 1] == "1e-4"
    put(job_for(engine, "torchrun", tmp_path), tmp_path, "torchrun")
    done = subprocess.run(["bash", "train.sh", "--lr", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train.sh: name the script that trains:")


@pytest.mark.parametrize("engine", WRITABLE)
def test_pods_know_which_script_trains(engine: str, tmp_path: Path) -> None:
    found = [each for each in findings("k8s", job_for(engine, "k8s", tmp_path)) if each.severity == "error"]
    if engine in ("accelerate", "deepspeed"):
        (finding,) = found
        assert finding.code == "PT828"
        assert "--set launch.env.SCRIPT=/" in finding.help
    else:
        assert found == []
    named = findings("k8s", job_for(engine, "k8s", tmp_path, SCRIPT="/opt/own.py"))
    assert not [each for each in named if each.severity == "error"]


@pytest.mark.parametrize("engine", WRITABLE)
def test_older_torch_reads_the_allocators_setting(engine: str, tmp_path: Path) -> None:
    put(job_for(engine, "torchrun", tmp_path), tmp_path, "torchrun")
    _, env = play(tmp_path, "bash", "train.sh", SCRIPT="own.py")
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("kind", ["jobset", "job", "pytorchjob", "trainjob", "volcano"])
def test_kubernetes_starts_the_script_in_every_pod(kind: str, tmp_path: Path) -> None:
    job = job_for("megatron", "k8s", tmp_path)
    k8s = job.plan.launch.k8s.model_copy(update={"kind": kind})
    launch = job.plan.launch.model_copy(update={"k8s": k8s})
    job = Job(job.plan.model_copy(update={"launch": launch}), job.run_id, job.run_dir, program=job.program)
    text = render("k8s", job).text
    found = [each for each in yaml.safe_load_all(text) if each]
    config = next(each for each in found if each["kind"] == "ConfigMap")
    assert job.program is not None
    assert config["data"].keys() == {"plan.json", "train.sh"}
    assert config["data"]["train.sh"] == job.program.files["train.sh"]
    assert "secretKeyRef" not in text
    (command,) = commands(found)
    assert command[0] == "env"
    assert [word.partition("=")[0] for word in command[1:4]] == ["NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
    assert command[4:] == ["bash", "/etc/partool/train.sh"]


def commands(value: object) -> list[list[str]]:
    """Return the commands of all containers in a manifest, each once."""
    found: list[list[str]] = []
    if isinstance(value, dict):
        if isinstance(value.get("command"), list) and value["command"] not in found:
            found.append(value["command"])
        value = list(value.values())
    for each in value if isinstance(value, list) else []:
        found += [one for one in commands(each) if one not in found]
    return found


def run(*arguments: str) -> tuple[int, str, str]:
    """Run ``partool render`` or ``partool plan``."""
    name, *words = arguments
    app = typer.Typer()
    app.command()({"render": render_command.command, "plan": plan_command.command}[name])
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.stdout, done.stderr


def test_files_that_are_there_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))
    spec, out = tmp_path / "mine.yaml", tmp_path / "out"
    spec.write_text(
        SPEC.replace("ENGINE", "megatron").replace("TARGET", "torchrun").replace('image: "team/train:1", ', "")
    )
    out.mkdir()
    (out / "train.sh").write_text("mine\n")
    code, _, told = run("render", str(spec), "-o", str(out))
    assert (code, "has another train.sh already" in told, "--force" in told) == (2, True, True)
    assert [file.name for file in out.iterdir()] == ["train.sh"]
    assert (out / "train.sh").read_text() == "mine\n"
    code, _, told = run("render", str(spec), "-o", str(out), "--force")
    assert (code, "torchrun" in (out / "train.sh").read_text()) == (0, True), told
    code, _, told = run("render", str(spec), "-o", str(out))  # the same files once more
    assert code == 0, told


def test_the_commands_write_for_an_engine_and_improve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))
    spec = tmp_path / "mine.yaml"
    spec.write_text(SPEC.replace("ENGINE", "partool").replace("TARGET", "local").replace('image: "team/train:1", ', ""))
    code, text, told = run("render", str(spec), "--engine", "megatron")
    assert code == 0, told
    assert "torchrun --nproc_per_node 4" in text
    assert "lr 0.0003" in told
    _, _, told_less = run("render", str(spec), "--engine", "megatron", "--set", "optimizer.lr=1e-4")
    assert "lr 0.0" not in told_less
    out = tmp_path / "out"
    code, _, told = run("render", str(spec), "--engine", "deepspeed", "--target", "slurm", "-o", str(out))
    assert code == 0, told
    assert {file.name for file in out.iterdir()} == {"job.sbatch", "train.sh", "ds_config.json", "plan.json"}
    code, _, told = run("render", str(spec), "--engine", "deepspeed", "--set", "parallel.pipeline.stages=2")
    assert (code, "PT828" in told) == (1, True)
    code, _, told = run("render", str(spec), "--engine", "megatron", "--array", "training.steps=1,2", "-t", "slurm")
    assert (code, "--array" in told) == (2, True)
    options = ("--set", "launch.target=torchrun", "--set", "engine=megatron", "--improve")
    code, text, told = run("plan", str(spec), *options, "--set", "parallel.recompute=full", "--output", "json")
    assert code == 0, told
    found = json.loads(text)
    assert (found["engine"], found["before"]["verdict"]) == ("megatron", "green")
    # Recomputation is what the command line holds.
    assert not any(change["name"].startswith("recompute") for change in found["changes"])
    spec.write_text(spec.read_text() + "parallel: {recompute: full, micro_batch: 1}\n")
    code, text, told = run("plan", str(spec), *options)
    assert code == 0, told
    assert "remove recompute-granularity" in text
    assert "times as fast" in text or "faster" in text
