"""``partool export``: the process it starts, and its exit codes."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from partool.cli import export
from partool.plan.run import RunStatus, write_status


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "tiny-20260101-000000-abcd"
    folder.mkdir(parents=True)
    write_status(folder, RunStatus(state="done", created=1.0))
    return folder


def call(monkeypatch, code: int, *arguments: str):
    lines: list[list[str]] = []

    def start(line, check, **_):
        lines.append(line)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", start)
    app = typer.Typer()
    app.command()(export.command)
    return CliRunner().invoke(app, arguments), lines


def test_command_line(run, monkeypatch, tmp_path):
    result, lines = call(
        monkeypatch, 0, "tiny", "--out", str(tmp_path / "x"), "--step", "7", "--dtype", "bf16", "--force"
    )
    assert result.exit_code == 0, result.output
    ((_python, *line),) = lines
    start = ["-P", "-m", "partool_runtime.export", str(run), "--format", "hf", "--out", str(tmp_path / "x")]
    assert line == [*start, "--step", "7", "--dtype", "bf16", "--force"]
    _, ((*_, ema),) = call(monkeypatch, 0, "--out", "y", "--best", "--ema")
    _, (mean,) = call(monkeypatch, 0, "--out", "y", "--average", "3")
    assert (ema, mean[-2:]) == ("--ema", ["--average", "3"])
    for wrong in (["--best", "--step", "3"], ["--best", "--average", "2"], ["--ema", "--average", "2"]):
        assert call(monkeypatch, 0, "--out", "y", *wrong)[0].exit_code == 2
    assert call(monkeypatch, 0, "--out", "y")[1][0][4:] == [str(run), "--format", "hf", "--out", "y"]


@pytest.mark.parametrize(("code", "exit_code"), [(78, 1), (1, 1), (-9, 3)])
def test_exit_codes(code, exit_code, run, monkeypatch):
    assert call(monkeypatch, code, "last", "--out", "x")[0].exit_code == exit_code


def test_what_cannot_be_started(run, monkeypatch):
    result, lines = call(monkeypatch, 0, "other", "--out", "x")
    assert result.exit_code == 1
    assert "PT502" in result.output
    assert call(monkeypatch, 0, "tiny")[0].exit_code == 2  # --out is missing
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result, more = call(monkeypatch, 0, "tiny", "--out", "x")
    assert result.exit_code == 3
    assert "PT501" in result.output
    assert "partool[train]" in result.output
    assert not lines + more
