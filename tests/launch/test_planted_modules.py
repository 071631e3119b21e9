"""Modules in the working folder: no partool process may import them in place of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from launch_helpers import make_plan
from patience import PATIENCE

from partool.cli import export
from partool.launch import calibrate, doctor, tune
from partool.launch.local.target import LocalTarget
from partool.launch.store import RunStore
from partool.render.job import Job
from partool.render.render import render
from partool.work.traced import refresh

PARTOOL = Path(sys.executable).with_name("partool")
PLANTED = (
    "torch.py", "transformers.py", "numpy.py", "safetensors.py", "pydantic.py", "json.py", "sitecustomize.py",
    "usercustomize.py", "partool_kernels/__init__.py", "partool_runtime/__init__.py",
)  # fmt: skip
TEXT = "import os\nopen(os.environ['CANARY'], 'a').write(__name__ + '\\n')\nraise ImportError('a stranger')\n"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 16,
    "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 16,
}  # fmt: skip
SPEC = """
name: planted
model: {hf: model}
hardware: {accelerator: cpu, per_node: 1}
parallel: {compile: none}
training: {sequence_length: 16, global_batch: 1, steps: 1, precision: fp32}
data: {source: spec.yaml, format: text, cache: cache}
"""


class Folder:
    """A spec's folder with planted modules."""

    def __init__(self, path: Path) -> None:
        self.path, self.canary = path / "work", path / "canary"
        for name in PLANTED:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text(TEXT)
        (self.path / "model").mkdir()
        (self.path / "model" / "config.json").write_text(json.dumps(LLAMA))
        (self.path / "spec.yaml").write_text(SPEC)
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.environment |= {"PARTOOL_HOME": str(path / "home"), "CANARY": str(self.canary)}

    def run(self, *command: str) -> str:
        """Run a command there; returns its output."""
        done = subprocess.run(
            command,
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120 * PATIENCE,
            check=False,
        )
        said = f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert not self.canary.exists(), f"{self.canary.read_text()}\n{said}"
        assert done.returncode == 0, said
        return said


@pytest.mark.timeout(300)
def test_planted_modules_are_not_imported(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.run(str(PARTOOL), "doctor")
    folder.run(str(PARTOOL), "plan", "spec.yaml")  # starts the runtime to trace the model
    folder.run(sys.executable, "-m", "partool", "schema")


class _StoppedError(Exception):
    """Raised in place of starting a process."""


def test_every_command_line_is_safe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def started(command: list[str], **_: object) -> NoReturn:
        seen.append(command)
        raise _StoppedError

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(subprocess, "run", started)
    run = RunStore(tmp_path).create("x")
    for start in (
        lambda: calibrate.measure("quick", 1),
        lambda: list(tune.tune(None, tune.Tuning(tmp_path, 1.0))),
        lambda: refresh(make_plan().model, "fp32"),
        lambda: export.command(str(run.path), out=tmp_path / "out"),
        lambda: list(doctor.checks(None)),
    ):
        with pytest.raises(_StoppedError):
            start()
    assert [command[:3] for command in seen] == [[sys.executable, "-P", "-m"]] * 5


def test_rendered_and_shown_commands_are_safe(tmp_path: Path) -> None:
    for nodes in (1, 2):
        plan = make_plan(2, target="slurm", image=None)
        plan = plan.model_copy(update={"devices": plan.devices.model_copy(update={"nodes": nodes})})
        for target, count in (("torchrun", nodes), ("slurm", 1)):
            text = render(target, Job(plan, "run-1", tmp_path)).text  # type: ignore[arg-type]
            assert text.count("-P -m partool_runtime.agent") == count
            assert text.count("partool_runtime.") == count
    shown = LocalTarget().describe(make_plan(2), None, resume=False)
    assert shown.count("-P -m partool_runtime.") == shown.count("partool_runtime.") == 2
