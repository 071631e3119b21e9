"""The agent's parts without processes: its command line, secrets, the log of failures, the ranks' output."""

from __future__ import annotations

import errno
import fcntl
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from partool.plan.run import agent_command, lock_file, rank_environment
from partool.plan.types import Plan, Variable
from partool.spec.launch import LaunchSpec
from partool_runtime.agent.error_files import ErrorRecord
from partool_runtime.agent.failures import FailureLog, is_lost_peer, reached_step, signature
from partool_runtime.agent.options import AgentOptions, AgentPlace, check_plan, parse, place
from partool_runtime.agent.rank_logs import RankLogs
from partool_runtime.agent.report import shortened
from partool_runtime.agent.run import main, run_agent
from partool_runtime.agent.secrets import _make_key, agents_key, read_secrets
from partool_runtime.errors import ConfigurationError

sys.path.insert(0, str(Path(__file__).parents[3] / "launch"))
from launch_helpers import make_plan


@pytest.mark.parametrize(
    ("nodes", "rank", "rendezvous", "message"),
    [
        ("4", "$(JOB_COMPLETION_INDEX)", "h:1", "--node-rank is '$(JOB_COMPLETION_INDEX)': a variable that was not"),
        ("4", "$SLURM_NODEID", "h:1", "--node-rank is '$SLURM_NODEID': a variable that was not expanded"),
        ("4", "", "h:1", "--node-rank is empty"),
        ("4", "  ", "h:1", "--node-rank is empty"),
        ("4", "7", "h:1", "--node-rank is 7, with --nodes 4 it goes from 0 to 3"),
        ("4", "4", "h:1", "--node-rank is 4, with --nodes 4 it goes from 0 to 3"),
        ("4", "-1", "h:1", "--node-rank is '-1', no number"),
        ("4", "1.0", "h:1", "--node-rank is '1.0', no number"),
        ("4", "\u0661", "h:1", "no number"),
        ("4", None, "h:1", "--nodes 4 needs --node-rank"),
        ("4", "1", None, "--nodes 4 needs --rendezvous"),
        (None, "0", "h:1", "--node-rank and --rendezvous need --nodes"),
        ("0", "0", "h:1", "--nodes is 0"),
        ("", "0", "h:1", "--nodes is empty"),
        ("2", "0", "", "--rendezvous is ''"),
        ("2", "0", "host", "--rendezvous is 'host', not HOST:PORT"),
        ("2", "0", ":29500", "not HOST:PORT"),
        ("2", "0", "$head:29500", "a variable that was not expanded"),
        ("2", "0", "a b:29500", "not HOST:PORT"),
        ("2", "0", "host:0", "there is no port 0"),
        ("2", "0", "host:65536", "there is no port 65536"),
        ("2", "0", "fd00::1:29500", "not HOST:PORT"),
    ],
)
def test_places_that_make_no_sense_are_explained(
    nodes: str | None, rank: str | None, rendezvous: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        place(nodes, rank, rendezvous)
    assert caught.value.code == "PT581"
    assert message in caught.value.message
    assert caught.value.help


def test_places() -> None:
    assert place(None, None, None) == place("1", None, None) == AgentPlace()
    assert place("4", "03", "node-0.job:29500") == AgentPlace(4, 3, "node-0.job", 29500)
    assert place("2", "0", "[fd00::1]:29500") == AgentPlace(2, 0, "fd00::1", 29500)
    assert not place("1", "0", "h:1").several


def test_the_command_line_is_what_the_agent_reads(tmp_path: Path) -> None:
    assert agent_command("python", tmp_path / "p", tmp_path, resume=False)[-2:] == ["--run-dir", str(tmp_path)]
    command = agent_command(
        "python",
        tmp_path / "plan.json",
        tmp_path,
        resume=True,
        plan_hash="abc",
        nodes=2,
        node_rank=1,
        rendezvous="h:29500",
        echo="all",
        termination_log="/dev/termination-log",
    )
    assert command[:4] == ["python", "-P", "-m", "partool_runtime.agent"]
    options = parse(command[4:])
    assert (options.plan, options.run_dir, options.resume) == (tmp_path / "plan.json", tmp_path, True)
    assert (options.plan_hash, options.place, options.echo) == ("abc", AgentPlace(2, 1, "h", 29500), "all")
    assert options.termination_log == Path("/dev/termination-log")


def test_a_wrong_command_line_is_never_retried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan.json", "--run-dir", str(tmp_path), "--node-rnk", "1"]) == 78
    assert main(["plan.json", "--run-dir", str(tmp_path), "--nodes", "2", "--node-rank", ""]) == 78
    errors = capsys.readouterr().err
    assert errors.count("partool: PT581: ") == 2
    assert "--node-rnk" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("nodes", "where", "plan_hash", "code", "text"),
    [
        (1, AgentPlace(), "0" * 64, "PT580", "the one meant is 000000000000"),
        (1, AgentPlace(), "", "PT580", "the one meant is (empty)"),
        (2, AgentPlace(), None, "PT582", "the plan is for 2 nodes, this agent was started for one"),
        (2, AgentPlace(3, 0, "h", 1), None, "PT582", "the plan is for 2 nodes, --nodes is 3"),
        (1, AgentPlace(2, 0, "h", 1), None, "PT582", "the plan is for one node, --nodes is 2"),
        (2, AgentPlace(2, 0, "h", 1), None, "PT506", "the plan's mesh has 2 ranks, its hardware 2 x 2"),
    ],
)
def test_plans_for_other_nodes(nodes: int, where: AgentPlace, plan_hash: str | None, code: str, text: str) -> None:
    plan = make_plan(2)
    plan = plan.model_copy(update={"devices": plan.devices.model_copy(update={"nodes": nodes})})
    with pytest.raises(ConfigurationError) as caught:
        check_plan(plan, where, plan_hash)
    assert (caught.value.code, text in caught.value.message) == (code, True)
    if nodes == 2 and not where.several:
        assert "--nodes 2 --node-rank K --rendezvous HOST:PORT" in caught.value.help


def test_the_environment_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    plan = make_plan(2, env={"A": "launch"}, secrets={"TOKEN": {"file": "/nowhere"}})
    variables = tuple(Variable(name=name, value="plan", origin="test") for name in ("A", "B"))
    environment = rank_environment(plan.model_copy(update={"environment": variables}))
    assert (environment["A"], environment["B"]) == ("launch", "plan")
    assert "TOKEN" not in environment
    several = plan.model_copy(update={"devices": plan.devices.model_copy(update={"nodes": 2})})
    assert "GLOO_SOCKET_IFNAME" in rank_environment(plan)
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(several)


@pytest.mark.parametrize(("content", "value"), [(b"abc\n", "abc"), (b"abc", "abc"), (b"a\n\n", "a\n"), (b"a\r\n", "a")])
def test_secrets(tmp_path: Path, content: bytes, value: str) -> None:
    (tmp_path / "s").write_bytes(content)
    assert read_secrets(LaunchSpec.model_validate({"secrets": {"S": {"file": str(tmp_path / "s")}}})) == {"S": value}


@pytest.mark.parametrize("content", [b"", b"\n", b"hidden\0", b"hidden\xff", b"hidden" * 50_000, None])
def test_secrets_that_cannot_be_read_are_named_and_not_shown(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "s").write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        read_secrets(LaunchSpec.model_validate({"secrets": {"S": {"file": str(tmp_path / "s")}}}))
    assert caught.value.code == "PT584"
    assert f"the secret S cannot be read from {tmp_path}/s" in caught.value.message
    assert "hidden" not in str(caught.value)


def test_secrets_of_kubernetes_are_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"secret": "hub", "key": "token", "file": "/nowhere"}
    launch = LaunchSpec.model_validate({"target": "k8s", "image": "a", "secrets": {"PARTOOL_TEST_S": secret}})
    with pytest.raises(ConfigurationError, match="the Kubernetes Secret hub"):
        read_secrets(launch)
    monkeypatch.setenv("PARTOOL_TEST_S", "x")
    assert read_secrets(launch) == {}


class Failing:
    """A run that fails repeatedly."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "events").mkdir()
        self.events = run_dir / "events" / "rank-0.jsonl"

    def train_to(self, step: int) -> None:
        with self.events.open("a") as events:
            events.write(json.dumps({"kind": "step", "data": {"step": step}}) + '\n{"kind": "checkpoint", "da')

    def fail(self, attempt: int, what: str, plan: Plan | None = None) -> int:
        return FailureLog(self.run_dir, plan or make_plan()).note(attempt, signature(what))


def test_equal_failures_count_until_there_is_progress(tmp_path: Path) -> None:
    run = Failing(tmp_path)
    assert run.fail(1, "ValueError: at 0x7f01 in 12 s") == 1
    assert run.fail(1, "ValueError: at 0x7f01 in 12 s") == 1  # the same attempt
    assert run.fail(2, "ValueError: at 0x8f22 in 3 s") == 2
    run.train_to(5)
    assert run.fail(3, "ValueError: at 0x7f01 in 12 s") == 1
    assert run.fail(4, "ValueError: at 0x7f01 in 12 s") == 2
    run.train_to(3)  # from an earlier checkpoint
    assert run.fail(5, "ValueError: at 0x7f01 in 12 s") == 3
    run.train_to(5)  # with the same progress as before
    assert run.fail(6, "ValueError: at 0x7f01 in 12 s") == 4
    assert run.fail(7, "KeyError: 'x'") == 1
    assert run.fail(8, "ValueError: at 0x7f01 in 12 s") == 1
    assert run.fail(9, "ValueError: at 0x7f01 in 12 s", make_plan(shutdown_timeout_s=9)) == 1
    (tmp_path / "checkpoints" / "step-00000700").mkdir(parents=True)
    assert reached_step(tmp_path, tmp_path / "checkpoints") == 700


def test_a_torn_log_of_failures_can_be_read(tmp_path: Path) -> None:
    run = Failing(tmp_path)
    assert run.fail(1, "a") == 1
    with (tmp_path / "failures.jsonl").open("a") as file:
        file.write('{"attempt": 2, "sig\n')
    assert run.fail(2, "a") == 2


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4512", True),
        ("Connection reset by peer", True),
        ("lost another rank: timeout", True),
        ("CUDA out of memory", False),
        ("broken on purpose", False),
    ],
)
def test_the_loss_of_a_peer_is_known(message: str, lost: bool) -> None:
    record = ErrorRecord(0, 1, 0.0, "RuntimeError", message, "", 1)
    assert is_lost_peer(record) is lost


def logs_of(tmp_path: Path, echo: Any) -> tuple[RankLogs, dict[str, Path]]:
    logs = RankLogs(tmp_path, echo)
    logs.attempt = 1
    found = logs.reify({0: {"RANK": "4"}, 1: {"RANK": "5"}} if echo == "all" else {0: {"RANK": "0"}, 1: {"RANK": "1"}})
    files = {f"{stream}{rank}": Path(path) for stream, paths in (("out", found.stdouts), ("err", found.stderrs))
             for rank, path in paths.items()}  # fmt: skip
    return logs, files


def test_all_lines_are_shown_whole_behind_their_rank(tmp_path: Path, capfdbinary: Any) -> None:
    logs, files = logs_of(tmp_path, "all")
    files["out0"].write_bytes(b"one\ntw")
    files["out1"].write_bytes(b"eins\n")
    files["err1"].write_bytes(b"oh\n")
    logs.pump()
    logs.pump()
    assert capfdbinary.readouterr() == (b"[4] one\n[5] eins\n", b"[5] oh\n")
    with files["out0"].open("ab") as file:
        file.write(b"o\n\nlast \xc3\xa9 without an end")
    logs.close()
    logs.close()
    assert capfdbinary.readouterr() == ("[4] two\n[4] \n[4] last é without an end\n".encode(), b"")


def test_rank_0_is_copied_as_it_is_and_none_is_silent(tmp_path: Path, capfdbinary: Any) -> None:
    for echo, wanted in (("rank0", b"one\ntw"), ("none", b"")):
        logs, files = logs_of(tmp_path / echo, echo)
        files["out0"].write_bytes(b"one\ntw")
        files["out1"].write_bytes(b"eins\n")
        logs.close()
        assert capfdbinary.readouterr().out == wanted


def test_long_summaries_keep_both_ends() -> None:
    text = "headline\n" + "é" * 5000 + "\nlast line"
    short = shortened(text, 4000)
    assert len(short.encode()) <= 4000
    assert short.startswith("headline\n")
    assert short.endswith("\nlast line")
    assert shortened("short", 4000) == "short"


def test_a_key_is_made_where_a_file_system_has_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounted object stores have no hard links; an existing key is never replaced."""

    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.delenv("PARTOOL_AGENT_KEY", raising=False)
    monkeypatch.setattr("partool_runtime.agent.secrets.os.link", refused)
    monkeypatch.setattr("partool_runtime.agent.secrets._SETTLED_S", 0.0)
    made = agents_key(tmp_path, print)
    assert len(made) == 64
    assert agents_key(tmp_path, print) == made
    _make_key(tmp_path / "agents.key")  # another node's key, a moment later
    assert agents_key(tmp_path, print) == made
    assert [(file.name, file.stat().st_mode & 0o777) for file in tmp_path.iterdir()] == [("agents.key", 0o600)]


@pytest.mark.timeout(60)
def test_a_stop_ends_an_agent_that_waits_for_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The job went back to the queue and began anew while the agent of its last attempt still ends ranks."""
    options = AgentOptions(tmp_path / "plan.json", tmp_path, plan_hash="0" * 64)
    with (tmp_path / lock_file(0)).open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        stop = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM))
        stop.start()
        try:
            code = run_agent(options)
        finally:
            stop.cancel()
    assert code == 75
    assert "SIGTERM while the agent waited for another one" in capfd.readouterr().err
