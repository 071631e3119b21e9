"""The last step of a run on Kubernetes in ``status`` and ``list``: from node 0's log, or why it is not known."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from k8s_case import Case, case, plan_of
from test_launch_commands import invoke

from partool.launch.describe import step_age
from partool.launch.k8s import client as k8s_client
from partool.launch.k8s.last_step import LINES
from partool.launch.store import Run

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(k8s_client, "_PAUSES_S", (0.02, 0.05, 0.1))
    with case(tmp_path, custom=False) as found:
        yield found


@pytest.fixture
def run(here: Case) -> Run:
    """A run of two pods that are running."""
    started = here.submit(plan_of(kind="job"))
    here.pod(started, 0), here.pod(started, 1)
    return started


def ago(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(time.time() - seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def pod(run: Run, node: int = 0, attempt: int = 0) -> str:
    return f"{run.id}-node-0-{node}-{attempt}"


def age(here: Case, run: Run) -> str:
    return step_age(run, here.target.status(run))


def test_status_and_list_say_how_long_ago_the_last_step_was_logged(here: Case, run: Run) -> None:
    write = here.cluster.write
    write(pod(run), "[0] step   4/2000  loss 5.1000  ETA 3 h", at=ago(9000))
    write(
        pod(run), "[0] step  14/2000  loss 5.0000  tokens/s 1,024  ETA 3 h", "[1] step 99/2000  loss 1.0", at=ago(7205)
    )
    write(pod(run), "[0] step  14/2000  validation loss 4.9000", "[0] note: step 15/2000  loss", at=ago(60))
    write(pod(run, 1), "[2] step 500/2000  loss 1.0", at=ago(5))
    assert age(here, run) == "step 14 logged 2 h ago"
    assert "\n  step 14 logged 2 h ago\n" in invoke("status", run.id).stdout
    assert "running" in invoke("list").stdout
    assert invoke("list").stdout.rstrip().endswith("  step 14 logged 2 h ago")
    last = json.loads(invoke("status", run.id, "--output", "json").stdout)["last_step"]
    assert (last["attempt"], last["step"]) == (1, 14)
    assert time.time() - last["step_at"] == pytest.approx(7205, abs=60)
    assert "logged_step" not in (run.path / "status.json").read_text()


def test_a_restarted_run_is_judged_by_its_new_pods(here: Case, run: Run) -> None:
    here.cluster.write(pod(run), "[0] step 1234/2000  loss 5.1000", at=ago(7300))
    here.pod(run, 0, attempt=1), here.pod(run, 1, attempt=1)
    here.cluster.write(pod(run, attempt=1), "[0] reads the checkpoint of step 1200")
    assert age(here, run) == "no step logged yet"
    here.cluster.write(pod(run, attempt=1), "[0] step 1210/2000  loss 5.0000", at=ago(7300))
    assert age(here, run) == "step 1210 logged 2 h 1 min ago"


def test_an_unknown_step_is_said_to_be_unknown(here: Case, run: Run) -> None:
    assert "last step unknown: " in age(here, run)
    assert "is waiting to start" in age(here, run)
    here.cluster.write(pod(run), "[0] step 3/2000  loss 5.1000", *["[0] a warning"] * LINES)
    assert age(here, run) == f"last step unknown: not in the last {LINES} lines of the log"
    here.cluster.forbidden.add(("get", "pods/log"))
    assert age(here, run) == "last step unknown: you may not get pods/log in namespace default"
    assert "last step unknown: you may not get pods/log" in invoke("status", run.id).stdout


def test_only_running_runs_have_a_last_step(here: Case) -> None:
    queued = here.submit(plan_of(kind="job"))
    assert age(here, queued) == ""
    assert not [path for verb, path, _ in here.cluster.requests if path.endswith("/log")]
