"""The run store: folders, look-up, status of dead agents."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from partool.launch.store import Run, RunNotFoundError, RunStore
from partool.plan.run import RunStatus, process_start, read_status, this_process, write_status
from partool.spec.numbers import duration


def _status(run: Run, **changes: object) -> None:
    write_status(run.path, RunStatus.model_validate(read_status(run.path).model_dump() | changes))


def test_two_launches_never_share_a_folder(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: store.create("same"), range(64)))
    assert len({run.path for run in runs}) == 64
    assert {run.name for run in runs} == {"same"}
    assert {run.status().state for run in runs} == {"starting"}
    created = [run.status().created for run in store.runs()]
    assert created == sorted(created, reverse=True)


def test_a_taken_name_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("partool.launch.store.secrets.token_hex", lambda _: next(tokens))
    monkeypatch.setattr("partool.launch.store.time.strftime", lambda *_: "20260101-000000")
    store = RunStore(tmp_path)
    assert [store.create("x").id for _ in range(2)] == ["x-20260101-000000-aaaa", "x-20260101-000000-bbbb"]


def test_find(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    with pytest.raises(RunNotFoundError, match="no run 'last'"):
        store.find("last")
    first, second, other = store.create("a"), store.create("a"), store.create("a-b")
    assert store.find("last") == other
    assert store.find("a") == second
    assert store.find("a-b") == other
    assert store.find(first.id) == first
    assert store.find(first.id[:-1]) == first or first.id[:-1] == second.id[:-1]
    assert store.find(str(first.path)) == first
    with pytest.raises(RunNotFoundError, match="the beginning of"):
        store.find("a-2")
    with pytest.raises(RunNotFoundError, match=f"no run 'z'.*{other.id}"):
        store.find("z")


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARTOOL_HOME", raising=False)
    assert RunStore().root == tmp_path / ".partool" / "runs"
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "elsewhere"))
    assert RunStore().root == tmp_path / "elsewhere" / "runs"


def test_status_of_a_dead_or_recycled_process(tmp_path: Path) -> None:
    run = RunStore(tmp_path).create("a")
    _status(run, state="running")
    assert run.status().state == "running"  # this process is alive
    _status(run, process_start="long ago")
    assert (run.status().state, run.status().reason) == ("failed", "agent gone")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    start = process_start(gone.pid)
    gone.wait()
    _status(run, pid=gone.pid, process_start=start or "")
    assert run.status().state == "failed"
    _status(run, host="another-host")
    assert run.status().state == "running"  # cannot be determined here
    _status(run, state="done", **{**this_process(), "pid": gone.pid})
    assert run.status().state == "done"
    (run.path / "status.json").write_text("{")
    damaged = run.status()
    assert (damaged.state, damaged.reason.partition(":")[0]) == ("failed", "no readable status.json")


def test_a_zombie_does_not_count_as_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) is None
    child.wait()


def test_earlier_plans_are_kept(tmp_path: Path) -> None:
    run = RunStore(tmp_path).create("a")
    for text in ("one", "two", "two", "three"):
        (run.path / "x").mkdir(exist_ok=True)
        from partool.launch.store import _put

        _put(run.path / "plan.json", text)
    names = ("plan.json", "plan-1.json", "plan-2.json")
    assert [(run.path / name).read_text() for name in names] == ["three", "one", "two"]
    assert not (run.path / "plan-3.json").exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3599, "59 min 59 s"), (3599.6, "1 h"),
        (3605, "1 h"), (7620, "2 h 7 min"), (86400, "1 day"), (3985920, "46 days 3 h"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("name", ["../../..", "a/b", "..", "", "A", "x; touch y"])
def test_names_that_lead_out_of_the_store_are_refused(name: str, tmp_path: Path) -> None:
    store = RunStore(tmp_path / "home")
    for make in (lambda: store.create(name), lambda: store.next_submitted(name, "0" * 64)):
        with pytest.raises(ValueError, match="cannot be the name of a run"):
            make()
    assert list(tmp_path.iterdir()) == []
