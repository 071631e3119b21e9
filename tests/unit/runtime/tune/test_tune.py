"""Tuning of kernels with a fake timer: the configurations that run, are kept, and are written."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import is_running

from partool.cli.main import run
from partool.cli.tune import message_of
from partool.launch import tune as launching
from partool.launch.tune import Tuning
from partool_kernels import proof
from partool_kernels.cases import Case
from partool_kernels.compiled import Compiled
from partool_kernels.proof import Proof, ProofJob
from partool_kernels.registry import KERNELS, Config, Request
from partool_kernels.registry import kernels as registered
from partool_kernels.registry.feasible import obstacle
from partool_kernels.registry.look_up import Registry
from partool_kernels.registry.tables import stored
from partool_runtime.tune.candidates import MOST, beside, first, grid, runnable
from partool_runtime.tune.journal import FAILED, FILE, Journal
from partool_runtime.tune.machine import TuningMachine
from partool_runtime.tune.requests import RequestError, as_json, examples, from_json, placed
from partool_runtime.tune.run import TuneOptions, rehearse, tune
from partool_runtime.tune.search import BrokenDeviceError, Tools, tune_one

NAME = "glu_forward"
ASKED = Request(NAME, "sm_90", ("bfloat16",), (("f", 8192),), 4096, ("silu",), "Fake", 8, "3.9")
GRID = grid(ASKED)
DEFAULT = GRID[0]
NEEDS = Compiled(1024, 32, 0, True, False)
Cost = Callable[[Config], float]


class Bench:
    """A fake device with given costs per configuration, and given ones that are wrong, refused or cause a fault."""

    def __init__(self, cost: Cost, *, wrong: Sequence[Config] = (), refused: Sequence[Config] = ()) -> None:
        self.cost, self.wrong, self.refused = cost, wrong, refused
        self.spent = 0.0
        self.ran: list[Config] = []
        self.error: dict[Config, Exception | type[BaseException]] = {}

    def medians_s(self, runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
        assert repeats > 0
        found = []
        for call in runs:
            call()
            found.append(self.spent)
        return found

    def case(self, request: Request, device: torch.device, seed: int) -> Case:
        exact = torch.full((3,), 1.0 + seed, dtype=torch.float64)

        def launch(config: Config) -> Sequence[torch.Tensor]:
            self.ran.append(config)
            if config in self.error:
                raise self.error[config]
            self.spent = self.cost(config)
            return (exact.float() + (config in self.wrong),)

        def eager() -> Sequence[torch.Tensor]:
            self.spent = 5e-3
            return (exact.float(),)

        return Case(run=launch, eager=eager, exact=lambda: (exact,), factors=(1.5,))

    def prove(self, jobs: Iterable[ProofJob], processes: int) -> Iterator[Proof]:
        for job in jobs:
            bad = job.config in self.refused
            yield Proof(job, None if bad else NEEDS, ("spills 8 bytes per thread, 0 are on record",) if bad else ())

    def tools(self, folder: Path) -> Tools:
        machine = TuningMachine(torch.device("cpu"), "sm_90", "Fake", 8, "1.0", "3.9.1", self)
        return Tools(machine, Registry(folder=folder), Journal(folder), prove=self.prove, make_case=self.case)


def by_place(config: Config) -> float:
    """Return a cost that falls along the grid; the rule's configuration has the highest."""
    return 1e-3 * (1.0 - 0.05 * GRID.index(config))


def tuned(bench: Bench, folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], bool]:
    events: list[dict[str, Any]] = []
    done = tune([ASKED], bench.tools(folder), TuneOptions(folder, **changes), events.append)
    return events, done


def test_the_fastest_is_written_with_what_was_measured(tmp_path: Path) -> None:
    bench = Bench(by_place)
    events, done = tuned(bench, tmp_path)
    assert done
    assert [event["event"] for event in events] == ["start", "request", "result", "end"]
    ((request, config, entry),) = stored(NAME, "sm_90", tmp_path)
    assert (request, config) == (ASKED, GRID[-1])
    found = entry.measured
    assert found is not None
    assert (found.time_s, found.default_s, found.reference_s) == (by_place(GRID[-1]), 1e-3, 5e-3)
    assert (found.tried, found.triton, found.driver, found.torch) == (len(GRID), "3.9.1", "1.0", torch.__version__)
    assert entry.resources["3.9"].registers == NEEDS.registers
    choice = Registry(folder=tmp_path).get(ASKED)
    assert (choice.source, choice.config, choice.time_s) == ("exact", GRID[-1], found.time_s)
    assert set(bench.ran) == set(GRID)


@pytest.mark.parametrize(("gain", "kept"), [(1.029, False), (1.031, True)])
def test_small_gains_are_not_kept(tmp_path: Path, gain: float, kept: bool) -> None:
    tuned(Bench(lambda config: 1e-3 / (gain if config == GRID[3] else 1.0)), tmp_path)
    ((_, config, entry),) = stored(NAME, "sm_90", tmp_path)
    assert config == (GRID[3] if kept else DEFAULT)
    assert entry.measured is not None
    assert entry.measured.default_s == 1e-3


def test_what_computes_the_wrong_thing_is_not_kept(tmp_path: Path) -> None:
    tuned(Bench(by_place, wrong=GRID[-2:]), tmp_path)
    assert next(stored(NAME, "sm_90", tmp_path))[1] == GRID[-3]


def test_nothing_is_written_where_even_the_rule_is_wrong(tmp_path: Path) -> None:
    events, done = tuned(Bench(by_place, wrong=GRID), tmp_path)
    assert done
    assert "no configuration computes the right thing" in next(e["reason"] for e in events if e["event"] == "skipped")
    assert list(stored(NAME, "sm_90", tmp_path)) == []


def test_what_the_compiler_sorts_out_is_not_run(tmp_path: Path) -> None:
    bench = Bench(by_place, refused=GRID[-2:])
    tuned(bench, tmp_path)
    assert not set(bench.ran) & set(GRID[-2:])
    assert next(stored(NAME, "sm_90", tmp_path))[1] == GRID[-3]


def test_what_cannot_be_launched_is_left_out(tmp_path: Path) -> None:
    bench = Bench(by_place)
    bench.error = {GRID[-1]: RuntimeError("out of resource: shared memory")}
    tuned(bench, tmp_path)
    assert next(stored(NAME, "sm_90", tmp_path))[1] == GRID[-2]


def test_a_rule_that_cannot_run_ends_the_request(tmp_path: Path) -> None:
    events, _ = tuned(Bench(by_place, refused=[DEFAULT]), tmp_path)
    assert "its rule's configuration cannot run: spills" in next(e["reason"] for e in events if e["event"] == "skipped")


def test_inputs_that_do_not_fit_end_the_request(tmp_path: Path) -> None:
    bench = Bench(by_place)
    tools = bench.tools(tmp_path)

    def too_large(request: Request, device: torch.device, seed: int) -> Case:
        raise torch.OutOfMemoryError

    events: list[dict[str, Any]] = []
    tune([ASKED], dataclasses.replace(tools, make_case=too_large), TuneOptions(tmp_path), events.append)
    assert "do not fit the memory of Fake" in events[2]["reason"]


@pytest.mark.parametrize("fault", [False, True])
def test_an_error_of_a_request_leaves_the_others(tmp_path: Path, fault: bool) -> None:
    bench = Bench(by_place)
    tools = bench.tools(tmp_path)

    def failing(request: Request, device: torch.device, seed: int) -> Case:
        if request.rows == 4096:
            raise RuntimeError("HIP error: x" if fault else "no such inputs")
        return bench.case(request, device, seed)

    events: list[dict[str, Any]] = []
    work = [ASKED, dataclasses.replace(ASKED, rows=8192)]
    failing_tools = dataclasses.replace(tools, make_case=failing)
    if fault:
        with pytest.raises(BrokenDeviceError, match="HIP error: x"):
            tune(work, failing_tools, TuneOptions(tmp_path), events.append)
        return
    assert tune(work, failing_tools, TuneOptions(tmp_path), events.append)
    assert [event["event"] for event in events] == ["start", "request", "skipped", "request", "result", "end"]
    assert events[2]["reason"] == "RuntimeError: no such inputs"


def test_only_the_rules_configuration_may_spill() -> None:
    spilling = dataclasses.replace(NEEDS, spilled_bytes=8)

    def prove(jobs: Iterable[ProofJob], processes: int) -> Iterator[Proof]:
        return (Proof(job, spilling, proof.faults(job, spilling)) for job in jobs)

    found = runnable(ASKED, GRID, prove, 1)
    assert set(found.kept) == {DEFAULT}
    assert all(reason.startswith("spills 8 bytes") for reason in found.refused.values())


def test_results_are_verified_on_fewer_rows_where_memory_is_short(tmp_path: Path) -> None:
    bench = Bench(by_place)
    rows: list[int] = []

    def short(request: Request, device: torch.device, seed: int) -> Case:
        if seed:
            rows.append(request.rows)
            if request.rows > 512:
                raise torch.OutOfMemoryError
        return bench.case(request, device, seed)

    entry = tune_one(ASKED, dataclasses.replace(bench.tools(tmp_path), make_case=short), time.monotonic() + 60)
    assert entry.config.config == GRID[-1]
    assert rows == [4096, 512]


class Killed(BaseException):
    """The process ends here."""


def test_it_goes_on_after_a_kill(tmp_path: Path) -> None:
    bench = Bench(by_place)
    victim = GRID[4]
    bench.error = {victim: Killed}
    for _ in range(2):  # the second time, the configuration is blamed
        with pytest.raises(Killed):
            tuned(bench, tmp_path)
    before = list(bench.ran)
    assert before.count(victim) == 2
    assert all(before.count(config) == 1 for config in GRID[:4])
    with (tmp_path / FILE).open("a") as file:
        file.write('\n["torn')
    events, done = tuned(bench, tmp_path)
    assert done
    again = bench.ran[len(before) :]
    assert victim not in again
    assert set(GRID) - {victim} - set(before) <= set(again)
    # Of the configurations timed before, only the finalists and the winner run again.
    assert not set(again) & set(before) - {DEFAULT, *sorted(GRID, key=by_place)[:5]}
    assert next(stored(NAME, "sm_90", tmp_path))[1] == GRID[-1]
    assert events[-1] == {"event": "end", "finished": True, "left": 0}


def test_a_fault_of_the_gpu_ends_the_process(tmp_path: Path) -> None:
    bench = Bench(by_place)
    bench.error = {GRID[2]: RuntimeError("CUDA error: an illegal memory access was encountered\nmore")}
    with pytest.raises(BrokenDeviceError, match=r"illegal memory access was encountered$"):
        tuned(bench, tmp_path)


def test_what_is_known_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(Bench(by_place), tmp_path)
    (tmp_path / FILE).unlink()
    bench = Bench(by_place)
    events, done = tuned(bench, tmp_path)
    assert (done, bench.ran, events[0]["known"]) == (True, [], 1)
    tuned(bench, tmp_path, remeasure=True)
    assert bench.ran
    # For other code the timing is unknown.
    monkeypatch.setattr("partool_runtime.tune.run.source_hash", lambda kernel: "0" * 16)
    events, _ = tuned(bench, tmp_path)
    assert events[0]["known"] == 0


def test_a_budget_is_kept(tmp_path: Path) -> None:
    bench = Bench(by_place)
    events, done = tuned(bench, tmp_path, budget_s=0.0)
    assert (done, bench.ran) == (False, [])
    assert events[-1] == {"event": "end", "finished": False, "left": 1}
    # With no time left the rule's configuration is still timed, as a baseline.
    entry = tune_one(ASKED, bench.tools(tmp_path), time.monotonic() - 1.0)
    assert set(bench.ran) == {DEFAULT}
    assert entry.config.config == DEFAULT


@pytest.fixture
def wide() -> Request:
    request = next(each for each in KERNELS["gemm"].examples("sm_90") if each.rows <= 64)
    return dataclasses.replace(request, device="Fake", units=8, triton="3.9")


def test_large_grids_are_searched_beside_the_best(tmp_path: Path, wide: Request) -> None:
    everything = grid(wide)
    assert len(everything) > MOST + 20
    early = first(wide, Registry(folder=tmp_path))
    able = [config for config in everything if obstacle(wide, config) is None]
    goal = next(config for config in able if config not in early and any(one in early for one in beside(config, able)))
    sizes = _numbers(goal)

    def cost(config: Config) -> float:
        return 1e-3 * (1.0 + sum(abs(_log(value) - _log(sizes[name])) for name, value in _numbers(config).items()))

    bench = Bench(cost)
    entry = tune_one(wide, bench.tools(tmp_path), time.monotonic() + 60.0)
    assert len(set(bench.ran)) < len(everything)
    best = entry.config.config
    assert cost(best) == min(map(cost, bench.ran)) < min(map(cost, early))
    assert all(cost(other) >= cost(best) for other in beside(best, able))


def _numbers(config: Config) -> dict[str, int]:
    return config.constants | {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _log(value: int) -> float:
    return value.bit_length() if value > 0 else 0.0


def test_the_first_ones_are_the_same_after_a_restart(wide: Request) -> None:
    registry = Registry(folder=Path("/nowhere"))
    chosen = first(wide, registry)
    assert chosen == first(wide, registry)
    assert chosen[0] == KERNELS["gemm"].default(wide)
    assert MOST <= len(chosen) <= MOST + 5
    assert len(set(chosen)) == len(chosen)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(GRID), max_size=len(GRID)), st.sets(st.sampled_from(GRID[1:])))
@settings(max_examples=40, deadline=None)
def test_the_best_of_what_can_run_is_found(costs: list[float], refused: set[Config]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(lambda config: costs[GRID.index(config)], refused=tuple(refused))
        entry = tune_one(ASKED, bench.tools(Path(folder)), time.monotonic() + 60.0)
    assert entry.measured is not None
    best = min(costs[place] for place, config in enumerate(GRID) if config not in refused)
    assert entry.measured.time_s == best or (entry.measured.time_s == costs[0] and costs[0] < best * 1.03)


def test_journals_keep_failures_and_times(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(ASKED, GRID[0])
    journal.end(ASKED, GRID[0], 0.5)
    journal.begin(ASKED, GRID[1])
    journal.end(ASKED, GRID[1], FAILED)
    journal.begin(ASKED, GRID[2])
    other = Journal(tmp_path)
    assert [other.cached_s(ASKED, config) for config in GRID[:4]] == [0.5, FAILED, None, None]
    assert other.cached_s(dataclasses.replace(ASKED, rows=8192), GRID[0]) is None
    other.finish()
    assert not (tmp_path / FILE).exists()


def test_requests_as_json() -> None:
    sent = as_json(ASKED)
    assert from_json(json.loads(json.dumps(sent))) == dataclasses.replace(ASKED, device="", units=0, triton="")
    assert list(examples([NAME], "sm_90")) == list(KERNELS[NAME].examples("sm_90"))
    for changes, words in (
        ({"kernel": "nope"}, "no kernel 'nope'"),
        ({"architecture": "sm_1"}, "no architecture"),
        ({"shape": {"n": 1}}, "has f"),
        ({"shape": {"f": 0}}, "has f"),
        ({"rows": 0}, "0 rows"),
        ({"rows": "x"}, "a request holds"),
    ):
        with pytest.raises(RequestError, match=words):
            from_json(sent | changes)
    with pytest.raises(RequestError, match="a request holds"):
        from_json([1])


def test_requests_are_those_of_the_machine(tmp_path: Path) -> None:
    machine = Bench(by_place).tools(tmp_path).machine
    loose = dataclasses.replace(ASKED, architecture="", rows=3000, device="", units=0, triton="")
    assert placed([loose, ASKED], machine) == [ASKED]
    with pytest.raises(RequestError, match="asked for gfx942, but Fake is sm_90"):
        placed([dataclasses.replace(ASKED, architecture="gfx942")], machine)


def test_a_rehearsal_compiles_and_says_what_it_sorts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KERNELS[NAME]
    few = [*list(kernel.configs(ASKED))[:2], Config((("BLOCK", 1000),), 4, 1), Config((("BLOCK", 512),), 64, 1)]
    monkeypatch.setitem(registered.KERNELS, NAME, dataclasses.replace(kernel, configs=lambda request: iter(few)))
    (event,) = rehearse([ASKED], 1, lambda jobs, processes: map(proof.prove, jobs))
    assert (event["grid"], event["candidates"], event["refused"]) == (len(grid(ASKED)), len(grid(ASKED)), 2)
    assert event["reasons"] == {"blocks are powers of two": 1, "N warps of N lanes are more than N threads": 1}
    assert message_of(event).endswith(
        "2 ruled out (1 blocks are powers of two; 1 N warps of N lanes are more than N threads)"
    )


def _script(*processes: list[dict[str, Any]]) -> Callable[..., Iterator[dict[str, Any]]]:
    left = list(processes)
    return lambda requests, tuning: iter(left.pop(0))


FAULT = {"event": "failed", "reason": "an illegal address", "code": 4}


def test_a_faulting_gpu_gets_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    end = {"event": "end", "finished": True, "left": 0}
    monkeypatch.setattr(launching, "_process", _script([{"event": "start"}, FAULT], [end]))
    events = list(launching.tune([], Tuning(Path("x"), 1.0)))
    assert [event["event"] for event in events] == ["start", "restarted", "end"]
    monkeypatch.setattr(launching, "_process", lambda requests, tuning: iter([FAULT]))
    with pytest.raises(launching.TuneError, match="faulted 8 times: an illegal address"):
        list(launching.tune([], Tuning(Path("x"), 1.0)))
    monkeypatch.setattr(launching, "_process", lambda requests, tuning: iter([FAULT | {"code": 3}]))
    with pytest.raises(launching.TuneError) as found:
        list(launching.tune([], Tuning(Path("x"), 1.0)))
    assert found.value.exit_code == 3


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run(["tune", *arguments])
    shown = capsys.readouterr()
    return (end.value.code if isinstance(end.value.code, int) else 0), shown.out, shown.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(capsys, "--kernel", NAME, "--out", str(tmp_path / "tuned"))
    assert (code, out) == (3, "")
    assert "error[PT495]: kernels cannot be tuned here: torch finds no GPU" in err
    assert "--dry-run" in err
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernel", "nope"], "--kernel nope"),
        (["--kernel", "norm_foward"], "did you mean norm_forward?"),
        (["--kernel", "norm"], "did you mean norm_backward or"),
        (["--out", __file__], "it is no folder"),
        (["--budget", "5"], "--budget 5"),
        (["--set", "a=b"], "--set is about a spec"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert words in " ".join(err.replace("│", " ").split())  # the box breaks lines where a path's length makes it


@pytest.mark.timeout(120)
def test_it_ends_with_all_its_processes_when_told_to(tmp_path: Path) -> None:
    """SIGTERM, as from a scheduler, ends compilers too, and says nothing of their pipes."""
    command = [sys.executable, "-m", "partool", "tune", "--dry-run", "--out", str(tmp_path / "tuned")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while len(below(process.pid)) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    family = below(process.pid)
    assert len(family) >= 3  # the measuring process and its compilers
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert err.strip() == "partool: interrupted"
    until = time.monotonic() + 5
    while any(is_running(pid) for pid in family) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in family)


def below(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | below(child)
    return found


SPEC = """
model: {layers: 2, hidden: 512, heads: 8, ffn_hidden: 2048, vocab: 4096}
hardware: {accelerator: h100-sxm, per_node: 1}
training: {sequence_length: 1000, global_batch: 4, precision: PRECISION}
kernels: {fused: FUSED}
data: python-stdlib
"""


def test_a_plans_requests_are_sent_the_costly_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    entry = {"event": "result", **as_json(ASKED), "default": False, "time_s": 1e-4, "default_s": 2e-4}
    events = [
        {"event": "start", "device": "Fake", "architecture": "sm_90", "requests": 1, "known": 0, "out": "x"},
        entry | {"reference_s": 3e-4, "tried": 9, "error": 0.5, "file": "x"},
        {"event": "end", "finished": True, "left": 0},
    ]

    def process(requests: Any, tuning: Tuning) -> Iterator[dict[str, Any]]:
        sent.append(requests)
        return iter(events)

    monkeypatch.setattr(launching, "_process", process)
    spec = tmp_path / "a.yaml"
    spec.write_text(SPEC.replace("PRECISION", "bf16").replace("FUSED", "[glu]"))
    code, out, err = call(capsys, str(spec), "--out", str(tmp_path / "tuned"))
    assert code == 0
    assert {request["kernel"] for request in sent[0]} == {"glu_forward", "glu_backward"}
    assert all(request["rows"] & (request["rows"] - 1) == 0 for request in sent[0])
    assert all(request["architecture"] == "sm_90" for request in sent[0])
    assert "glu_forward silu bfloat16 f=8192 rows=4096: 100 us, torch 300 us; 2.00x the default's speed, 9 tried" in out
    assert "wrote 1 entry to" in err
    call(capsys, str(spec), "--kernel", "glu_forward")
    assert {request["kernel"] for request in sent[1]} == {"glu_forward"}
    spec.write_text(SPEC.replace("PRECISION", "bf16").replace("FUSED", "[]"))
    code, _, err = call(capsys, str(spec))
    assert "nothing to measure" in err
    assert len(sent) == 2
