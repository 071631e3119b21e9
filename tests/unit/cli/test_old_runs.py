"""Runs with plans of version 1 can be listed, followed and cancelled; commands that need the plan say how to go on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest

from partool.cli.main import run
from partool.plan.outline import other_version, outline
from partool.plan.run import process_start, read_status, write_status
from partool.plan.types import PLAN_VERSION, Plan
from partool_runtime.errors import ConfigurationError
from partool_runtime.plan_file import load_plan

KEPT = Path(__file__).parents[2] / "data" / "old-form"
RUN = "old-form-20261123-032017-c26f"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path))
    return Path(shutil.copytree(KEPT, tmp_path / "runs" / RUN))


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run(list(arguments))
    found = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, found.out, found.err


@pytest.mark.parametrize(
    ("command", "words"),
    [("list", "done"), ("status", "step 4 of 4, loss 5.3718"), ("logs", "step 4/4  loss 5.3718")],
)
@pytest.mark.usefixtures("folder")
def test_runs_of_the_old_form_are_shown(command: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capfd, command, *([] if command == "list" else [RUN]))
    assert (code, err) == (0, "")
    assert words in out
    assert RUN in out or command == "logs"


def test_one_that_goes_on_is_cancelled(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as agent:
        going = {"state": "running", "ended": None, "exit_code": None, "pid": agent.pid, "host": gethostname()}
        status = read_status(folder).model_copy(update=going | {"process_start": process_start(agent.pid) or ""})
        write_status(folder, status)
        try:
            said(capfd, "cancel", RUN)
            assert agent.wait(20) != 0
        finally:
            agent.kill()


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("report", RUN), "PT503"),
        (("launch", RUN, "--resume"), "PT503"),
        (("launch", "PLAN"), "PT503"),
        (("render", "PLAN", "--target", "torchrun"), "PT503"),
        (("plan", "PLAN"), "PT503"),
        (("export", RUN, "--out", "weights"), "PT620"),
    ],
)
def test_what_needs_the_plan_says_how_to_go_on(
    arguments: tuple[str, ...], rule: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    named = [str(folder / "plan.json") if one == "PLAN" else one for one in arguments]
    code, _, err = said(capfd, *named)
    assert code != 0
    assert f"error[{rule}]" in err
    assert f"is a plan of version 1, and this partool reads version {PLAN_VERSION}" in err
    assert f"partool launch SPEC --resume {RUN}" in err
    assert not Path("weights").exists()


def test_ranks_say_the_same(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="plan of version 1"):
        load_plan(folder / "plan.json")


def test_a_plan_without_its_run_is_to_be_made_again(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "plan.json"
    shutil.copy(folder / "plan.json", alone)
    found = other_version(alone)
    assert found is not None
    assert found[1] == "make it again from its spec: partool plan SPEC --out FILE"
    assert (outline(alone).ranks, outline(alone).training.steps) == (2, 4)
    with pytest.raises(ValueError, match="plan_version"):
        Plan.from_json(alone.read_text())
    data = json.loads(alone.read_text()) | {"plan_version": PLAN_VERSION}
    alone.write_text(json.dumps(data))
    assert other_version(alone) is None  # malformed in another way, with its own message


def test_a_plan_of_a_later_version_asks_for_its_partool(folder: Path) -> None:
    file = folder / "plan.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"plan_version": PLAN_VERSION + 1}))
    found = other_version(file)
    assert found is not None
    assert "use the partool that made it" in found[1]
