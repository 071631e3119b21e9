"""Pools of ranks: values come back, and a case that raises, hangs or dies fails by its own name, and no other one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from _jobs import Jobs
from _plans import small_plan
from _ranks import Pools, RankError, Results, named


def joined() -> int:
    """Return the sum of the ranks, over a group that the pool keeps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def raising() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("seven")


def hanging() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


def dying() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.timeout(120)
def test_cases_fail_alone(pools: Pools) -> None:
    assert pools.run(2, os.getenv, "RANK") == ["0", "1"]
    assert pools.run(3, joined) == [3] * 3
    first = pools.run(2, os.getpid)
    assert [pools.run(2, joined) for _ in range(2)] == [[1, 1]] * 2
    assert pools.run(2, os.getpid) == first, "ranks stay"
    for case, words in ((raising, "ValueError: seven"), (hanging, "in hanging"), (dying, "status -11")):
        with pytest.raises(RankError, match=words) as error:
            pools.run(2, case, timeout_s=2)
        assert "rank 0" not in str(error.value)
        assert pools.run(2, joined) == [1, 1]
        assert pools.run(2, os.getpid) != first, "ranks are new"


def slow(seconds: float, value: str) -> str:
    time.sleep(seconds)
    return value


class Late(BaseException):
    """What a test's own timeout raises."""


@pytest.mark.timeout(60)
def test_the_answer_to_an_interrupted_case_is_not_the_next_ones(pools: Pools) -> None:
    def interrupt(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGUSR2, interrupt)
    assert pools.run(2, slow, 0.0, "first") == ["first"] * 2
    parent = os.getpid()
    if (child := os.fork()) == 0:
        time.sleep(0.5)
        os.kill(parent, signal.SIGUSR2)
        os._exit(0)
    try:
        with pytest.raises(Late):
            pools.run(2, slow, 1.0, "interrupted")
    finally:
        os.waitpid(child, 0)
        signal.signal(signal.SIGUSR2, before)
    assert pools.run(2, slow, 0.0, "next") == ["next"] * 2


@pytest.mark.timeout(60)
def test_a_rank_that_dies_between_cases_fails_one_case(pools: Pools) -> None:
    first = pools.run(2, os.getpid)
    os.kill(first[1], signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(RankError):
        pools.run(2, os.getpid, timeout_s=10)
    assert pools.run(2, os.getpid) != first


@pytest.mark.timeout(60)
def test_ranks_that_end_on_purpose(pools: Pools) -> None:
    assert pools.run(2, leaving, lost=[1]) == ["stayed", None]
    with pytest.raises(AssertionError, match="-11"):
        pools.run(2, dying, lost=[1])
    with pytest.raises(RankError):
        pools.run(2, os.getpid, lost=[1], timeout_s=2)  # it stays


def leaving() -> str:
    if os.environ["RANK"] == "1":
        os._exit(0)
    return "stayed"


@pytest.mark.timeout(60)
def test_results_run_once_and_their_failures_stay(pools: Pools) -> None:
    results = Results(pools, 2, once)
    assert results["good"] == results["good"]
    errors = []
    for _ in range(2):
        with pytest.raises(RankError, match="ValueError: bad") as error:
            results["bad"]
        errors.append(error.value)
    assert errors[0] is errors[1], "a failed case is not run again"
    assert results["good"] == results["good"]


def once(name: str) -> tuple[str, int]:
    if name == "bad":
        raise ValueError(name)
    return name, time.monotonic_ns()


@pytest.mark.timeout(60)
def test_who_reads_a_run_that_died_gets_its_error(pools: Pools, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, pools, killed)
    jobs.train("dead", small_plan(tmp_path), run="dead")
    assert "status" in jobs.ended("dead")
    for read in (lambda: jobs.events("dead", "step"), lambda: jobs.state("dead", 1)):
        with pytest.raises(RankError):
            read()


def killed(plan_json: str, run_dir: Path, resume: bool, stop_at: int) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return "done"


class Named(NamedTuple):
    size: int
    kind: str = "plain"
    deep: bool = False


def test_names_of_cases_drop_none() -> None:
    cases = [Named(1), Named(1, "odd"), Named(1, deep=True), Named(1, "odd", True), Named(1), Named(1)]
    found = named(cases)
    assert list(found.values()) == cases
    assert list(found)[:4] == ["size=1", "size=1 odd", "size=1 deep", "size=1 odd deep"]
