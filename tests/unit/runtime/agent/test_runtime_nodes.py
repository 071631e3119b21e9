"""Messages between the agents of several nodes: boards in threads of this process, with short waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from ports import free_port

from partool_runtime.agent.clock import AwakeClock
from partool_runtime.agent.interfaces import interface_towards, is_loopback, resolves_to_network
from partool_runtime.agent.node_messages import Outcome, Verdict, WaitTimes
from partool_runtime.agent.nodes import Board, NodesError, StoppedError, combined
from partool_runtime.agent.options import AgentPlace
from partool_runtime.agent.standing import Standing
from partool_runtime.agent.together import first_failure, judged
from partool_runtime.agent.wire import Desk, listen
from partool_runtime.errors import ConfigurationError

pytestmark = pytest.mark.timeout(60)
QUICK = WaitTimes(beat_s=0.05, silent_s=1.0, arrival_s=10, notice_s=0.2, farewell_s=2, stranger_s=0.5)


KEY = b"k" * 32


class Nodes:
    """Boards of one test, each gathering in its own thread."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.port = free_port()
        self.said: dict[str, list[str]] = {}
        self.boards: dict[str, Board] = {}
        self.ended: dict[str, BaseException | None] = {}
        self.stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(
        self,
        name: str,
        node: int,
        nodes: int = 2,
        run: str = "run",
        plan_hash: str = "a" * 64,
        timing: WaitTimes = QUICK,
        host: str = "127.0.0.1",
        key: bytes = KEY,
    ) -> Board:
        """Start a board and make it gather."""
        said = self.said.setdefault(name, [])
        board = self._stack.enter_context(
            Board(AgentPlace(nodes, node, host, self.port), run, plan_hash, key, timing=timing, say=said.append)
        )
        self.boards[name] = board
        thread = threading.Thread(target=self._gather, args=(name,), daemon=True)
        thread.start()
        self._threads.append(thread)
        return board

    def _gather(self, name: str) -> None:
        try:
            self.boards[name].gather(self.stop.is_set)
            self.ended[name] = None
        except BaseException as error:
            self.ended[name] = error

    def begin(self, attempt: int = 1) -> None:
        """Wait until node 0 sees all nodes, and start them."""
        wait_for(lambda: "0" in self.ended)
        assert self.ended["0"] is None
        self.boards["0"].begin(attempt, len)
        self.join()

    def join(self) -> None:
        """Wait until every board has gathered, or given up."""
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack)


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def outcome(node: int, code: int, **more: object) -> Outcome:
    return Outcome(node, f"host-{node}", code, **more)  # type: ignore[arg-type]


def test_nodes_meet_learn_the_attempt_and_end_alike(nodes: Nodes) -> None:
    for node in (2, 0, 1):
        nodes.add(str(node), node, nodes=3)
    nodes.begin(attempt=7)
    assert [nodes.boards[name].attempt for name in "012"] == [7, 7, 7]
    assert nodes.boards["0"].head == nodes.boards["1"].head == "127.0.0.1"

    nodes.boards["2"].report("rank 5 failed", stopping=False)
    wait_for(lambda: (nodes.boards["0"].relay() or nodes.boards["1"].trouble()) != "")
    assert nodes.boards["1"].trouble() == f"node 2 ({socket.gethostname()}) had failed"

    heard: dict[str, Verdict | None] = {}
    for node in (1, 2):
        mine = outcome(node, 1 if node == 1 else 78, reason=f"rank of node {node}")
        arguments = (heard, str(node), nodes.boards[str(node)], mine)
        threading.Thread(target=lambda h, n, b, m: h.update({n: b.hear(m, lambda: False)}), args=arguments).start()
    outcomes = nodes.boards["0"].collect(outcome(0, 1, reason="lost", lost_peer=True), 5, lambda: False)
    assert [found.code for found in outcomes] == [1, 1, 78]
    verdict = judged(outcomes)
    assert (verdict.code, verdict.reason, verdict.node) == (78, "rank of node 2", 2)
    nodes.boards["0"].announce(verdict)
    wait_for(lambda: len(heard) == 2)
    assert heard == {"1": verdict, "2": verdict}


def test_other_plans_are_refused_on_both_sides(nodes: Nodes) -> None:
    nodes.add("0", 0)
    nodes.add("1", 1, plan_hash="b" * 64)
    nodes.join()
    for name in "01":
        error = nodes.ended[name]
        assert isinstance(error, ConfigurationError)
        assert error.code == "PT580"
        assert "its plan is bbbbbbbbbbbb, that of node 0 aaaaaaaaaaaa" in error.message
    assert any("--node-rank 1" in line for line in nodes.said["0"])


def test_two_agents_with_one_number_are_refused(nodes: Nodes) -> None:
    nodes.add("0", 0, nodes=3)
    nodes.add("1", 1, nodes=3)
    wait_for(lambda: nodes.boards["1"].met)
    nodes.add("another 1", 1, nodes=3)
    wait_for(lambda: {"0", "another 1"} <= set(nodes.ended))
    refused = nodes.ended["another 1"]
    assert isinstance(refused, ConfigurationError)
    assert "--node-rank 1 is" in refused.message
    assert isinstance(nodes.ended["0"], ConfigurationError)
    nodes.stop.set()


def test_an_agent_of_another_run_is_refused_and_disturbs_nobody(nodes: Nodes) -> None:
    nodes.add("0", 0)
    nodes.add("stranger", 1, run="other")
    wait_for(lambda: "stranger" in nodes.ended)
    refused = nodes.ended.pop("stranger")
    assert isinstance(refused, NodesError)  # the sender has not proved the key, so the error must allow a retry
    assert str(refused).startswith("PT583: this agent belongs to run other, the one at 127.0.0.1:")
    nodes.add("1", 1)
    nodes.begin()
    assert not any(line.startswith("refused: ") for line in nodes.said["0"])


def test_an_agent_with_another_key_is_kept_out(nodes: Nodes) -> None:
    nodes.add("0", 0)
    nodes.add("stranger", 1, key=b"x" * 32, timing=replace(QUICK, arrival_s=1.0))
    wait_for(lambda: "stranger" in nodes.ended)
    assert "it has another key: all nodes need the same PARTOOL_AGENT_KEY" in str(nodes.ended.pop("stranger"))
    nodes.add("1", 1)
    nodes.begin()
    refusals = [line for line in nodes.said["0"] if "refused" in line]
    assert refusals == ["refused a connection from 127.0.0.1: its message is not signed with this run's key"]


def test_missing_nodes_are_named_again_and_again(nodes: Nodes) -> None:
    patient = WaitTimes(beat_s=0.05, arrival_s=1.2, notice_s=0.2, stranger_s=0.5)
    nodes.add("0", 0, nodes=4, timing=patient)
    nodes.add("2", 2, nodes=4, timing=patient)
    nodes.join()
    for name in "02":
        assert isinstance(nodes.ended[name], NodesError)
    assert str(nodes.ended["0"]) == "gave up after 1.2 s: waiting for nodes 1, 3 of 4"
    assert len(nodes.said["0"]) >= 3
    assert "waiting for nodes 1, 3 of 4" in nodes.said["2"][-1]


@pytest.mark.parametrize(
    ("host", "message"), [("127.0.0.1", "Connection refused"), ("no-such-host.invalid", "does not resolve")]
)
def test_node_0_is_waited_for_and_why_it_is_not_there(nodes: Nodes, host: str, message: str) -> None:
    nodes.add("1", 1, host=host)
    wait_for(lambda: any(message in line for line in nodes.said["1"]))
    nodes.stop.set()
    nodes.join()
    assert isinstance(nodes.ended["1"], StoppedError)
    assert nodes.boards["1"].hear(outcome(1, 75), lambda: False) is None


def test_node_0_says_if_the_host_is_another_machine(nodes: Nodes) -> None:
    nodes.add("0", 0, host="192.0.2.77")
    wait_for(lambda: bool(nodes.said["0"]))
    assert "192.0.2.77 is no address of this machine: was every agent started with --node-rank 0?" in nodes.said["0"][0]
    nodes.stop.set()
    nodes.join()


def test_a_late_node_0_and_one_whose_port_is_in_use_for_a_while(nodes: Nodes) -> None:
    nodes.add("1", 1)
    squatter = socket.socket()
    squatter.bind(("0.0.0.0", nodes.port))
    squatter.listen()
    nodes.add("0", 0)
    time.sleep(0.2)
    squatter.close()
    nodes.begin()
    assert nodes.ended == {"0": None, "1": None}


@pytest.mark.parametrize("silent", ["1", "0"])
def test_a_silent_node_is_noticed(nodes: Nodes, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays open, but nothing new comes."""
    nodes.add("0", 0)
    nodes.add("1", 1)
    nodes.begin()
    other = nodes.boards["1" if silent == "0" else "0"]
    assert other.trouble() == ""
    if silent == "0":
        monkeypatch.setattr(Desk, "serve", lambda self, wait_s: time.sleep(wait_s))
    nodes.boards[silent]._meeting.timing = WaitTimes(beat_s=30)
    begin = time.monotonic()
    wait_for(lambda: other.trouble() != "")
    assert "vanished" in other.trouble()
    assert time.monotonic() - begin < QUICK.silent_s + 1.5
    if silent == "1":
        found = other.collect(outcome(0, 1, reason="lost connection", lost_peer=True, time=1.0), 5, lambda: False)
        assert judged(found).reason.startswith(f"node 1 ({socket.gethostname()}) vanished")
        assert first_failure(found).node == 1
    else:
        assert other.hear(outcome(1, 0), lambda: False) is None


def test_a_clock_does_not_run_while_its_process_stands_still() -> None:
    times = iter([100.0, 100.5, 102.0, 7302.0, 7302.5, 7305.0])
    clock = AwakeClock(lambda: next(times))
    assert [clock.now() for _ in range(5)] == [100.5, 102.0, 102.0, 102.5, 105.0]


def test_an_agent_that_was_away_takes_nobody_for_gone(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours pass for both at once, as for a suspended job; a node that is silent after that is noticed."""
    away = [0.0]
    monkeypatch.setattr("partool_runtime.agent.clock.monotonic", lambda: time.monotonic() + away[0])
    nodes.add("0", 0)
    nodes.add("1", 1)
    nodes.begin()
    away[0] = 7200.0
    end = time.monotonic() + 2 * QUICK.beat_s
    while time.monotonic() < end:
        assert [nodes.boards[name].trouble() for name in "01"] == ["", ""]
    nodes.boards["1"]._meeting.timing = WaitTimes(beat_s=30)
    wait_for(lambda: "vanished" in nodes.boards["0"].trouble())


def test_a_stop_before_the_start_reaches_all(nodes: Nodes) -> None:
    nodes.add("0", 0, nodes=3)
    board = nodes.add("1", 1, nodes=3)
    wait_for(lambda: board.met)
    threading.Thread(target=board.hear, args=(outcome(1, 75, asked="SIGTERM"), lambda: False)).start()
    wait_for(lambda: "0" in nodes.ended)
    assert isinstance(nodes.ended["0"], StoppedError)
    verdict = judged(nodes.boards["0"].collect(outcome(0, 75), 5, lambda: False))
    assert (verdict.code, verdict.reason) == (75, "stopped by SIGTERM to node 1 (host-1)")
    nodes.boards["0"].announce(verdict)


def test_ranks_that_lost_those_of_a_node_stopped_before_its_first_step_have_not_failed() -> None:
    lost = outcome(0, 1, reason="rank 0: connection closed", lost_peer=True)
    early = outcome(1, 75, asked="SIGTERM", early=True)
    verdict = judged([lost, early])
    assert (verdict.code, verdict.reason) == (75, "stopped by SIGTERM to node 1 (host-1)")
    assert verdict.text.endswith("before the first step")
    assert judged([outcome(0, 1, reason="rank 0: out of memory"), early]).code == 1
    assert judged([lost, outcome(1, 75, asked="SIGTERM")]).code == 1


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 75], 75), ([75, 75], 75), ([0, 1], 1), ([75, 1], 1), ([1, 78, 0], 78), ([3], 1)],
)
def test_combined_codes(codes: list[int], code: int) -> None:
    assert combined(codes) == code


def test_nodes_know_who_is_the_furthest_behind_and_who_has_finished(nodes: Nodes) -> None:
    boards = [nodes.add(str(node), node, nodes=3) for node in range(3)]
    nodes.begin()
    standings = [Standing(rank, 7, 100.0 + rank, where=f" on node {rank}") for rank in range(3)]
    standings[1] = replace(standings[1], step=6)

    limits = [False, True, False]

    def seen() -> list[int | None]:
        found = [
            board.exchange(standing, patient)
            for board, standing, patient in zip(boards, standings, limits, strict=True)
        ]
        boards[0].relay()
        return [None if each is None else each.rank for each in found]

    wait_for(lambda: seen() == [1, None, 1])
    standings[2] = replace(standings[2], stopped=True)
    wait_for(lambda: seen() == [2, 2, None])
    wait_for(lambda: seen() and [board.patient() for board in boards] == [True, False, True])
    limits[1] = False
    wait_for(lambda: seen() and not any(board.patient() for board in boards))
    assert not any(board.stalled() or board.finished() for board in boards)
    boards[2].report("rank 2 made no progress", False, stalled=True)
    wait_for(lambda: (boards[0].relay(), all(board.stalled() for board in boards[:2]))[1])
    boards[1]._post(outcome(1, 0))
    wait_for(lambda: (boards[0].relay(), boards[0].finished() and boards[2].finished())[1])


def test_a_run_that_is_done_says_which_rank_had_to_be_killed() -> None:
    late = outcome(1, 0, reason="rank 5 did not end", text="partool: rank 5 did not end")
    verdict = judged([outcome(0, 0), late])
    assert (verdict.code, verdict.reason, verdict.text) == (0, late.reason, late.text)


def test_the_first_failure_is_a_cause() -> None:
    lost = outcome(0, 1, reason="rank 0: connection closed", time=10.0, lost_peer=True)
    cause = outcome(1, 1, reason="rank 2: out of memory", time=11.0)
    later = outcome(2, 1, reason="rank 4: out of memory", time=12.0)
    assert first_failure([lost, later, cause]) is cause
    assert first_failure([lost, outcome(1, 0)]) is lost
    assert first_failure([cause, outcome(3, 78, time=20.0)]).code == 78


@pytest.mark.parametrize(
    ("found", "bound"),
    [
        (["127.0.0.1"], ["127.0.0.1"]),  # given as a number: this machine only
        (["::ffff:127.0.0.2", "127.0.0.2"], ["::"]),  # 127.0.1.1 from a hosts file is no evidence
        (["192.0.2.7"], ["::"]),  # a service's address
        ([], ["::"]),  # not known yet
    ],
)
def test_where_node_0_listens(found: list[str], bound: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]
    monkeypatch.setattr("partool_runtime.agent.wire.socket.getaddrinfo", lambda *a, **k: entries)
    host = "127.0.0.1" if found == ["127.0.0.1"] else "node-0"
    monkeypatch.setattr("partool_runtime.agent.wire.listen_at", lambda address, port: address or "::")
    assert listen(host, 0) == bound


def test_node_0_listens_on_what_its_name_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems resolve a machine's own name to each address twice, once mapped into IPv6."""
    own = {"10.77.0.1", "fd00::1"}
    monkeypatch.setattr("partool_runtime.agent.wire.is_own", own.__contains__)
    monkeypatch.setattr("partool_runtime.agent.wire.listen_at", lambda address, port: address)
    names = ["::ffff:10.77.0.1", "10.77.0.1", "fd00::1", "127.0.1.1"]
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in names]
    monkeypatch.setattr("partool_runtime.agent.wire.socket.getaddrinfo", lambda *a, **k: entries)
    assert listen("node-0", 0) == ["10.77.0.1", "fd00::1"]


def test_interfaces() -> None:
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    assert interface_towards("127.0.0.1") == loopback[0]
    assert interface_towards("no-such-host.invalid") is None
    assert not resolves_to_network("localhost")
    assert not resolves_to_network("no-such-host.invalid")
    assert not resolves_to_network("203.0.113.9")
    assert is_loopback("::ffff:127.0.0.1")
