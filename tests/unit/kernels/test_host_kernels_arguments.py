"""Arguments that passes refuse before they touch memory; pools and their threads."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from partool.launch import doctor
from partool_kernels import KernelUnavailableError, _native
from partool_kernels.host import HostKernelError, Part, Pool, StepRule, UpdatePass, accumulate, sums, update, zero
from partool_kernels.host.types import Mode
from partool_kernels.reductions import BLOCK

MODES: list[Mode] = ["torch", "native"] if _native.library() else ["torch"]
needs_library = pytest.mark.skipif(_native.library() is None, reason="no compiled library")
RULE = StepRule("adamw", 1e-2, 0.9, 0.95, 1e-8, 0.1, 1)
SIZE = 10


def good(dtype: torch.dtype = torch.float32) -> Part:
    return Part(torch.ones(SIZE, dtype=dtype), (torch.ones(SIZE, dtype=dtype), torch.ones(SIZE, dtype=dtype)))


def shared(first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    room = torch.ones(4 * SIZE)
    return room[first : first + SIZE], room[second : second + SIZE]


Case = Callable[[Part, Mode], object]
ONES = torch.ones(SIZE)
REFUSED: dict[str, tuple[str, Case]] = {
    "type of master": ("master of part 0 is of type", lambda p, m: update([good(torch.bfloat16)], mode=m)),
    "type of moment": (
        "moment 1 of part 0 is of type torch.float64",
        lambda p, m: update([replace(p, moments=(ONES.clone(), ONES.double()))], mode=m),
    ),
    "integers": (
        "the gradient 0 is of type torch.int32; it has to be float32, float64, bfloat16, float16",
        lambda p, m: update([p], step=UpdatePass([ONES.int()], [RULE]), mode=m),
    ),
    "size of gradient": (
        "the gradient 0 has 9 elements, not 10",
        lambda p, m: update([p], step=UpdatePass([torch.ones(9)], [RULE]), mode=m),
    ),
    "size of moment": (
        "moment 0 of part 0 has 11 elements, not 10",
        lambda p, m: update([replace(p, moments=(torch.ones(11), p.moments[1]))], mode=m),
    ),
    "size of weights": ("the weights 0 has 8", lambda p, m: update([p], weights=[torch.ones(8)], mode=m)),
    "not contiguous": (
        "the gradient to commit 0 is not contiguous",
        lambda p, m: update([p], commit=UpdatePass([torch.ones(2 * SIZE)[::2]], [RULE]), mode=m),
    ),
    "not strided": (
        "the gradient 0 is not contiguous",
        lambda p, m: update([p], step=UpdatePass([ONES.to_sparse()], [RULE]), mode=m),
    ),
    "device": (
        "the gradient 0 is on meta, not in host memory",
        lambda p, m: update([p], step=UpdatePass([torch.ones(SIZE, device="meta")], [RULE]), mode=m),
    ),
    "gradients missing": ("0 gradients for 1 parts", lambda p, m: update([p], step=UpdatePass([], [RULE]), mode=m)),
    "weights missing": ("0 tensors for weights of 1 parts", lambda p, m: update([p], weights=[], mode=m)),
    "group": (
        "part 0 is of group 1 of 1",
        lambda p, m: update([replace(p, group=1)], step=UpdatePass([ONES], [RULE]), mode=m),
    ),
    "negative group": (
        "part 0 is of group -1 of 1",
        lambda p, m: update([replace(p, group=-1)], step=UpdatePass([ONES], [RULE]), mode=m),
    ),
    "moments of another kind": (
        "part 0 has 2 moments; lion keeps 1",
        lambda p, m: update([p], step=UpdatePass([ONES], [replace(RULE, kind="lion")]), mode=m),
    ),
    "kind": (
        "there is no optimizer 'adam'",
        lambda p, m: update([p], step=UpdatePass([ONES], [replace(RULE, kind="adam")]), mode=m),  # type: ignore[arg-type]
    ),
    "step": ("counted from 1", lambda p, m: update([p], step=UpdatePass([ONES], [replace(RULE, step=0)]), mode=m)),
    "beta": ("needs betas", lambda p, m: update([p], step=UpdatePass([ONES], [replace(RULE, beta2=1.0)]), mode=m)),
    "scale": ("not finite", lambda p, m: update([p], step=UpdatePass([ONES], [replace(RULE, scale=math.nan)]), mode=m)),
    "sums of integers": ("the gradient 0 is of type", lambda p, m: sums([ONES.int()], mode=m)),
    "sums of a view": ("not contiguous", lambda p, m: sums([torch.ones(4, 4).t()], mode=m)),
    "totals missing": ("1 tensors to go into 0", lambda p, m: accumulate([], [ONES], first=True, mode=m)),
    "size of total": ("has 10 elements, not 9", lambda p, m: accumulate([torch.ones(9)], [ONES], first=True, mode=m)),
    "total is source": ("share memory", lambda p, m: accumulate([ONES], [ONES], first=False, mode=m)),
    "totals overlap": ("share memory", lambda p, m: zero(shared(0, 9), mode=m)),
    "weights are the master": (
        "share memory",
        lambda p, m: update([p], step=UpdatePass([ONES], [RULE]), weights=[p.master], mode=m),
    ),
    "two parts overlap": (
        "share memory",
        lambda p, m: update(
            [replace(p, master=shared(0, 9)[0]), p],
            step=UpdatePass([p.moments[0], torch.ones(SIZE)], [RULE]),
            mode=m,
        ),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_touched(case: str, mode: Mode) -> None:
    words, call = REFUSED[case]
    one = good()
    with pytest.raises(HostKernelError, match=words):
        call(one, mode)
    assert all(bool((tensor == 1).all()) for tensor in (one.master, *one.moments, ONES))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("first", "second", "fits"), [(0, 10, True), (10, 0, True), (0, 9, False), (9, 0, False), (5, 5, False)]
)
def test_neighbours_fit_and_overlaps_do_not(first: int, second: int, fits: bool, mode: Mode) -> None:
    master, gradient = shared(first, second)
    one = Part(master, (torch.ones(SIZE), torch.ones(SIZE)))
    step = UpdatePass([gradient], [RULE])
    if fits:
        update([one], step=step, mode=mode)
    else:
        with pytest.raises(HostKernelError, match=r"the gradient 0|the master of part 0"):
            update([one], step=step, mode=mode)
        # With ``keep=False`` the pass writes neither masters nor moments.
        update([one], step=step, keep=False, weights=[torch.ones(SIZE)], mode=mode)


def test_what_is_only_read_may_be_the_same() -> None:
    gradient = torch.ones(SIZE)
    update([good(), good()], commit=UpdatePass([gradient] * 2, [RULE]), step=UpdatePass([gradient] * 2, [RULE]))
    assert sums([gradient, gradient[2:]]).finite == (True, True)


def test_native_is_an_error_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "library", lambda: None)
    for call in (
        lambda: update([good()], mode="native"),
        lambda: sums([torch.ones(3)], mode="native"),
        lambda: accumulate([torch.ones(3)], [torch.ones(3)], first=True, mode="native"),
        lambda: zero([torch.ones(3)], mode="native"),
    ):
        with pytest.raises(KernelUnavailableError, match="compiler"):
            call()
    update([good()], pool=Pool(3))


@pytest.mark.parametrize(("threads", "cores"), [(0, ()), (2, (-1,))])
def test_pools_that_make_no_sense(threads: int, cores: tuple[int, ...]) -> None:
    with pytest.raises(HostKernelError, match=r"thread|counted from 0"):
        Pool(threads, cores)


@needs_library
def test_cores_that_are_not_there() -> None:
    with pytest.raises(HostKernelError, match=r"cannot start 2 threads on cores \[1000000\]: Invalid"):
        Pool(2, (1_000_000,))


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_threads_stay_on_their_cores_and_end() -> None:
    core, before = min(os.sched_getaffinity(0)), _named()
    pool = Pool(2, (core,))
    mine = _named() - before
    assert [os.sched_getaffinity(thread) for thread in mine] == [{core}] * 2
    pool.close()
    pool.close()
    assert not _named() & mine
    total = torch.ones(4)
    accumulate([total], [torch.ones(4)], first=False, pool=pool)  # runs in this thread
    assert total.tolist() == [2.0] * 4


def _named() -> set[int]:
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm", encoding="ascii") as name:
            if name.read().strip() == "partool-host":
                found.add(int(thread))
    return found


@needs_library
def test_several_callers_share_a_pool() -> None:
    pool, size, turns = Pool(2), 2 * BLOCK + 9, 30
    totals, errors = [torch.zeros(size) for _ in range(3)], []

    def call(total: torch.Tensor) -> None:
        try:
            one = torch.ones(size)
            for _ in range(turns):
                accumulate([total], [one], first=False, pool=pool)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(total,)) for total in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert not errors
    assert all(bool((total == turns).all()) for total in totals)


FORKED = """
import os, torch
from partool_kernels.host import Pool, accumulate
pool, total = Pool(2), torch.ones(5)
accumulate([total], [torch.ones(5)], first=False, pool=pool)
child = os.fork()
if child == 0:
    accumulate([total], [torch.ones(5)], first=False, pool=pool)
    pool.close()
    os._exit(0 if total.tolist() == [3.0] * 5 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), total.tolist())
"""
ENDED_EARLY = """
import threading, time, torch
from partool_kernels.host import Pool, native
from partool_kernels.host.update import _library

def begun(pool, total, turns):
    # The library alone: Python ends a daemon thread where it waits for the GIL, which torch's functions do not outlive.
    lib, told = _library("native"), native.spans([total], [one])
    def call():
        for turn in range(turns):
            native.accumulate(lib, told, first=False, pool=pool)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread

one = torch.ones(4_000_000)
for _ in range(10):  # more threads than cores: some begin a turn when others are through with it
    pool, total = Pool(8), torch.zeros(one.shape)
    call = begun(pool, total, 1)
    while not total[::65536].any():
        pass
    pool.close()
    call.join()
    assert bool((total == 1).all())
pool = Pool(8)
begun(pool, total, 10**9)
time.sleep(0.1)
print("closed", flush=True)
raise SystemExit(3)
"""
ISA = "from partool_kernels import isa; print(isa())"


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_library
def test_a_fork_goes_on_without_threads_and_the_process_ends() -> None:
    # The parent does not close the pool: an interpreter must exit with pools open.
    assert _python(FORKED).stdout == "0 [2.0, 2.0, 2.0, 2.0, 2.0]\n"


@needs_library
@pytest.mark.timeout(90)
def test_pools_end_while_another_thread_makes_a_pass() -> None:
    ended = _python(ENDED_EARLY)
    assert (ended.stdout, ended.returncode) == ("closed\n", 3), ended.stderr


@needs_library
def test_instruction_set_by_environment() -> None:
    assert _python(ISA, PARTOOL_ISA="baseline").stdout == "baseline\n"
    refused = _python(ISA, PARTOOL_ISA="mmx")
    assert refused.returncode == 1
    assert f"PARTOOL_ISA='mmx': this machine and this build have {', '.join(_native.isas())}" in refused.stderr


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ((0, "avx2 avx512 avx2 baseline\n", ""), "ok", "compiled, for avx2 (PARTOOL_ISA could say avx512, baseline)"),
        ((0, "baseline baseline\n", ""), "ok", "compiled, for baseline"),
        ((0, "None\n", ""), "warning", "not compiled: optimizers in host memory step by torch's fused AdamW"),
        ((1, "", "Traceback\nInstructionSetError: PARTOOL_ISA='mmx'\n"), "failed", "PARTOOL_ISA='mmx'"),
    ],
)
def test_doctor_says_what_runs(
    said: tuple[int, str, str], status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = subprocess.CompletedProcess([], said[0], said[1], said[2])
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: answer)
    found = next(check for check in doctor.checks(None) if check.name == "kernels")
    assert found.verdict == status
    assert words in found.text
