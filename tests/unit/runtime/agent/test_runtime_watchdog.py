"""The watchdog's decisions, and what ranks tell their agent, without ranks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from partool.plan.progress import RunProgress, read_progress, seconds_since, write_progress
from partool_runtime.agent.pulses import Pulses
from partool_runtime.agent.stacks import process_state, write_stacks
from partool_runtime.agent.standing import Standing
from partool_runtime.agent.watchdog import (
    SLACK_S,
    STALLED_STEPS,
    STOPPED_STEPS,
    Setting,
    Stall,
    Watchdog,
)
from partool_runtime.pulse import PHASES, VARIABLE, Phase, Pulse, RankProgress, read
from partool_runtime.torch_internals.compiling import watch_compilation

PREDICTED_S = 2.0


@dataclass
class Ranks:
    """Ranks whose time passes as a test says; the agent looks ten times a step and at least once a second."""

    setting: Setting = "auto"
    predicted_s: float = PREDICTED_S
    count: int = 2
    now: float = 0.0
    stopped: set[int] = field(default_factory=set)
    progress: dict[int, RankProgress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.setting, self.predicted_s)
        self.progress = {rank: RankProgress(1, "training") for rank in range(self.count)}
        self.look()

    def look(self) -> Stall | None:
        """Let the agent look once."""
        return self.watchdog.observe(self.progress, self.now, lambda rank: "T" if rank in self.stopped else "S")

    def tell(self, rank: int, phase: Phase = "training", *, step: bool = False) -> None:
        """Let a rank tell its agent something."""
        now = self.progress[rank]
        now = replace(now, beats=now.beats + 1, phase=phase)
        if step:
            now = replace(now, step=now.step + 1, steps_done=now.steps_done + 1, step_at=self.now)
        self.progress[rank] = now

    def pause(self, seconds: float, look_s: float = 1.0) -> Stall | None:
        """Let time pass without progress, with a look every ``look_s``; return the first stall that the agent finds."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + min(look_s, seconds / 10))
            if stall := self.look():
                return stall
        return None

    def steps(self, count: int, step_s: float) -> None:
        """Do steps in which no stall must be found."""
        for _ in range(count):
            assert self.pause(step_s) is None
            for rank in self.progress:
                self.tell(rank, step=True)
            assert self.look() is None

    def until_found(self, look_s: float = 1.0) -> tuple[Stall, float]:
        """Return the stall that the agent finds, and the seconds until then."""
        begin = self.now
        stall = self.pause(1e5, look_s)
        assert stall is not None
        return stall, self.now - begin


@pytest.mark.parametrize("step_s", [0.01, 0.7, 31.0, 78.0, 600.0])
def test_stalls_compiles_and_saves_are_no_hang(step_s: float) -> None:
    """200 steps of which some take six times as long, a recompilation, a save and a validation, of any step time."""
    ranks = Ranks(predicted_s=step_s * 0.8)
    for block in range(20):
        ranks.steps(9, step_s)
        ranks.steps(1, 6 * step_s)
        phase: Phase = ("compiling", "saving", "validating")[block % 3]
        for rank in ranks.progress:
            ranks.tell(rank, phase)
        assert ranks.pause(1800.0, 60.0) is None
        for rank in ranks.progress:
            ranks.tell(rank)


@pytest.mark.parametrize("predicted_s", [0.001, 2.0, 100.0])
@pytest.mark.parametrize("step_s", [0.5, 78.0])
@pytest.mark.parametrize("done", [0, 1, 2, 50])
def test_a_stopped_rank_is_found_in_time(predicted_s: float, step_s: float, done: int) -> None:
    """Within three upper bars of a step and a minute, also before the first step and on a slower machine."""
    ranks = Ranks(predicted_s=predicted_s, count=3)
    ranks.steps(done, step_s)
    ranks.stopped = {1}
    stall, found_s = ranks.until_found()
    assert (stall.rank, stall.state) == (1, "T")
    bar_s = max(predicted_s, step_s) if done > 1 else predicted_s
    assert SLACK_S < found_s <= STOPPED_STEPS * bar_s + SLACK_S + 1


def test_a_hung_rank_is_found_though_no_signal_stopped_it() -> None:
    ranks = Ranks()
    ranks.steps(10, 3.0)
    ranks.now += 0.5
    ranks.tell(0)  # the other rank goes on for a moment before it waits
    ranks.look()
    stall, found_s = ranks.until_found()
    assert (stall.rank, stall.state, stall.progress.step) == (1, "S", 10)
    assert STALLED_STEPS * 3.0 < found_s <= STALLED_STEPS * 3.0 + SLACK_S + 1


def test_a_rank_may_wait_long_for_one_that_compiles() -> None:
    """Compilations happen in mid-run as well, and only on some ranks."""
    ranks = Ranks()
    ranks.steps(10, 1.0)
    ranks.pause(0.5)
    ranks.tell(0, "compiling")
    assert ranks.pause(3599.0, 10.0) is None
    ranks.tell(0)
    stall, found_s = ranks.until_found()
    assert stall.rank == 1
    assert found_s <= STALLED_STEPS * PREDICTED_S + SLACK_S + 1


def test_a_stopped_rank_is_found_beside_one_that_compiles() -> None:
    ranks = Ranks()
    ranks.steps(10, 1.0)
    ranks.tell(0, "compiling")
    ranks.stopped = {1}
    assert ranks.until_found()[0].rank == 1


def test_a_rank_of_an_earlier_step_is_named_first() -> None:
    ranks = Ranks()
    ranks.steps(5, 1.0)
    ranks.tell(1, step=True)
    ranks.pause(1.0)
    ranks.tell(0)
    ranks.look()
    assert ranks.until_found()[0].rank == 0


def test_predictions_that_are_too_short_do_not_shorten_the_limit() -> None:
    ranks = Ranks(predicted_s=0.001)
    ranks.steps(30, 50.0)
    assert ranks.watchdog.upper_bar_s() == pytest.approx(50.0)
    assert ranks.until_found()[1] > STALLED_STEPS * 50.0


def test_single_slow_steps_do_not_move_the_bar() -> None:
    ranks = Ranks(predicted_s=0.5)
    ranks.steps(40, 1.0)
    ranks.steps(1, 6.0)
    ranks.steps(9, 1.0)
    assert ranks.watchdog.upper_bar_s() == pytest.approx(1.0)


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "training"])
def test_other_phases_are_patient_and_bounded(phase: Phase) -> None:
    ranks = Ranks()
    ranks.steps(10, 1.0)
    for rank in ranks.progress:
        ranks.tell(rank, phase)
    assert ranks.pause(3599.0, 60.0) is None
    assert ranks.until_found(60.0)[0].progress.phase == phase


def test_a_number_of_seconds_is_the_limit_in_steps() -> None:
    ranks = Ranks(setting=20)
    assert ranks.pause(100.0) is None  # first steps compile
    ranks.steps(3, 1.0)
    assert 20.0 <= ranks.until_found()[1] <= 21.0
    ranks = Ranks(setting=20)
    ranks.stopped = {0}
    assert 20.0 <= ranks.until_found()[1] <= 21.0


def test_off_finds_nothing() -> None:
    ranks = Ranks(setting="off")
    ranks.steps(3, 1.0)
    ranks.stopped = {0}
    assert ranks.pause(1e5, 60.0) is None


def test_the_rank_that_holds_the_others_up_comes_first() -> None:
    waiting, behind, slow = Standing(0, 7, 10.0), Standing(1, 6, 11.0), Standing(2, 7, 9.9)
    stopped = Standing(3, 8, 50.0, stopped=True)
    order = sorted([waiting, behind, slow, stopped], key=lambda each: each.order)
    assert [each.rank for each in order] == [3, 1, 2, 0]


_RANK = """
import os, signal, sys, time
from partool_runtime.pulse import Pulse
pulse = Pulse.from_environment()
pulse.enter("training")
pulse.stepped(41)
with pulse.during("saving"):
    print("told", flush=True)
    sys.stdin.readline()
pulse.stepped(42)
def wait_for_nothing():
    print("waits", flush=True)
    if sys.argv[1:]:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
wait_for_nothing()
"""


def test_a_rank_tells_its_progress_and_its_stacks(tmp_path: Path) -> None:
    """Through memory without a name; a stopped process writes its Python stacks as well."""
    pulses = Pulses()
    paths = [pulses.open(rank) for rank in (4, 5)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, *["stop"] * index],
            env={VARIABLE: str(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, path in enumerate(paths)
    ]
    try:
        for rank in ranks:
            assert rank.stdin is not None
            assert rank.stdout is not None
            assert rank.stdout.readline() == "told\n"
        assert not any(path.exists() for path in paths)
        assert [(p.phase, p.step, p.steps_done) for p in pulses.progress().values()] == [("saving", 41, 1)] * 2
        for rank in ranks:
            print(file=rank.stdin, flush=True)
            assert rank.stdout is not None
            assert rank.stdout.readline() == "waits\n"
        after = pulses.progress()
        assert [(p.phase, p.step, p.steps_done) for p in after.values()] == [("training", 42, 2)] * 2
        assert abs(after[4].step_at - time.time()) < 600
        while process_state(ranks[1].pid) != "T":
            time.sleep(0.01)
        folder = write_stacks(tmp_path, 3, {4: ranks[0].pid, 5: ranks[1].pid}, pulses)
        texts = [(folder / f"rank-{rank}.stacks.txt").read_text() for rank in (4, 5)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        pulses.close()
    assert folder == tmp_path / "errors" / "attempt-3"
    assert ": state T" not in texts[0].splitlines()[0]
    assert ": state T (stopped by a signal" in texts[1].splitlines()[0]
    for text in texts:
        assert "in wait_for_nothing" in text
        assert f"thread {ranks[texts.index(text)].pid} (" in text


def test_names_of_ranks_that_never_began_do_not_remain() -> None:
    pulses = Pulses()
    first, second = pulses.open(0), pulses.open(0)
    assert not first.exists()
    pulses.close()
    assert not second.exists()


def test_a_rank_without_an_agent_has_nobody_to_tell() -> None:
    pulse = Pulse.from_environment({})
    pulse.stepped(1)
    pulse.beat()


@pytest.mark.long
def test_compilations_are_told_whenever_they_happen() -> None:
    """A second compilation in mid-run, too; afterwards the phase before it comes back."""
    told: list[str] = []

    class Recording(Pulse):
        def enter(self, phase: Phase) -> None:
            told.append(phase)
            super().enter(phase)

    pulse = Recording()
    watch_compilation(pulse)
    pulse.enter("training")
    double = torch.compile(lambda values: values * 2, backend="eager", dynamic=False)
    for length, phases in ((3, ["training", "compiling", "training"]), (3, []), (4, ["compiling", "training"])):
        double(torch.ones(length))
        assert told == phases
        told.clear()


def test_the_note_about_progress_survives_damage(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    note = RunProgress(attempt=2, step=7, step_at=12.5, phase="saving", phase_at=13.0)
    write_progress(tmp_path, note)
    assert read_progress(tmp_path) == note
    (tmp_path / "progress.json").write_text('{"attempt": "two"')
    assert read_progress(tmp_path) is None
    assert seconds_since(time.time() + 3600) == 0.0


def test_a_step_that_waits_for_its_data_is_no_hang() -> None:
    """A file server that fails over for minutes stops all ranks of a run of short steps."""
    ranks = Ranks()
    for _ in range(10):
        for rank in ranks.progress:
            ranks.tell(rank, "fetching")
        ranks.pause(0.5)
        ranks.steps(1, 0.5)
    assert ranks.watchdog.upper_bar_s() == PREDICTED_S  # such steps are measured
    for rank in ranks.progress:
        ranks.tell(rank, "fetching")
    assert ranks.pause(600.0, 10.0) is None


def test_a_full_file_system_leaves_ranks_unwatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {tmp_path / "full": False, tmp_path / "free": True}
    for folder in room:
        folder.mkdir()

    def allocate(descriptor: int, start: int, count: int) -> None:
        if not room[Path(f"/proc/self/fd/{descriptor}").readlink().parent]:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.truncate(descriptor, start + count)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    pulses = Pulses(tuple(room))
    path = pulses.open(0)
    assert path is not None
    assert path.parent.name == "free"
    assert pulses.progress()[0].beats == 0
    room[tmp_path / "free"] = False
    assert pulses.open(0) is None
    assert (pulses.progress(), pulses.stack(0)) == ({}, "")
    pulses.close()
    assert [list(folder.iterdir()) for folder in room] == [[], []]


def test_messages_that_are_being_written_are_read_anew() -> None:
    pulse = Pulse()
    pulse.stepped(7)
    good = bytes(pulse._page)
    torn = bytes(8) + good[8:]

    class Page:
        reads = 0

        def __getitem__(self, part: slice) -> bytes:
            self.reads += 1
            return (torn if self.reads < 4 else good)[part]

    page = Page()
    assert read(page).step == 7  # type: ignore[arg-type]
    assert page.reads == 4


def test_a_rank_that_compiles_nothing_loads_no_compiler() -> None:
    code = "import sys, partool_runtime.jobs.train.trainer; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
