"""Notifications of an agent: what is sent, to whom, and that they neither fail nor delay a run."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from _telemetry import small_plan

from partool.plan.run import RunStatus, agent_log
from partool.spec.launch import LaunchSpec, NotifySpec
from partool_runtime.agent import notify
from partool_runtime.agent.notify import Notifier
from partool_runtime.telemetry._events import EventWriter

TAKE = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


def notifier(run_dir: Path, **spec: Any) -> Notifier:
    plan = small_plan(launch=LaunchSpec(notify=NotifySpec(**spec)))
    (run_dir / "plan.json").write_text(plan.to_json())
    return Notifier(run_dir / "plan.json", run_dir)


def status(state: Any = "done", **more: Any) -> RunStatus:
    return RunStatus(state=state, created=1.0, attempt=2, **more)


def taken(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_command_gets_the_run(tmp_path: Path) -> None:
    events, file = EventWriter(tmp_path, 0), tmp_path / "told"
    events.write("step", {"step": 7, "loss": 1.25})
    command = [sys.executable, "-S", "-c", TAKE, str(file)]
    each = notifier(tmp_path, command=command)
    each.stalled(status("running"), "PT556: rank 1 made no progress")
    each.stalled(status("running"), "PT556: still none")  # the same attempt
    each.ended(status("failed", reason="rank 1: ValueError", exit_code=1))
    stall, failure = sorted(taken(file), key=lambda one: one["time"])
    assert (stall["event"], stall["state"], stall["attempt"]) == ("stall", "running", 2)
    assert stall["reason"] == "PT556: rank 1 made no progress"
    wanted = {"event": "failure", "run": tmp_path.name, "name": "small", "state": "failed", "exit_code": 1}
    wanted |= {"reason": "rank 1: ValueError", "step": 7, "loss": 1.25, "run_dir": str(tmp_path)}
    assert wanted.items() <= failure.items()
    assert failure["text"] == f"{tmp_path.name} failed after step 7: rank 1: ValueError"
    file.unlink()
    notifier(tmp_path, command=command, on=["stall", "failure"]).ended(status())
    assert taken(file) == []
    assert not agent_log(tmp_path, 2).exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/nowhere/at/all"], "/nowhere/at/all: No such file"),
        ([sys.executable, "-S", "-c", "raise SystemExit(3)"], "exit code 3"),
        ([sys.executable, "-S", "-c", "import time; time.sleep(60)"], "not taken within 1 s"),
    ],
)
def test_a_bad_command_is_one_warning(
    command: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "NOTIFY_S", 20.0 if "exit" in words else 1.0)
    began = time.monotonic()
    notifier(tmp_path, command=command).ended(status())
    assert time.monotonic() - began < 30
    (line,) = agent_log(tmp_path, 2).read_text().splitlines()
    assert "PT559" in line
    assert words in line


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if "good" in self.path else 403)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()


def test_a_webhook_is_posted_to_and_its_address_is_nowhere(
    webhook: tuple[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, posted = webhook
    monkeypatch.setattr(notify, "NOTIFY_S", 60.0)
    monkeypatch.setenv("TOLD_AT", f"{address}/good/s3cret")
    notifier(tmp_path, webhook_env="TOLD_AT").ended(status())
    monkeypatch.setenv("TOLD_AT", f"{address}/s3cret")
    notifier(tmp_path, webhook_env="TOLD_AT").ended(status())
    assert [one["event"] for one in posted] == ["end", "end"]
    assert "answered 403" in (tmp_path / "logs" / notify.NOTIFY_LOG).read_text()
    monkeypatch.delenv("TOLD_AT")
    notifier(tmp_path, webhook_env="TOLD_AT").ended(status())
    refused, unset = agent_log(tmp_path, 2).read_text().splitlines()
    assert "exit code 1" in refused
    assert "the variable TOLD_AT is not set" in unset
    texts = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert texts
    assert not any("s3cret" in text for text in texts)
