"""Optimizer passes on the host: correct against float64, and the same bits in every mode."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partool_kernels import _native
from partool_kernels.host import MOMENTS, Part, Pool, StepRule, Sums, UpdatePass, accumulate, sums, update, zero
from partool_kernels.host.types import Mode
from partool_kernels.reductions import BLOCK, block_sums

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MODES: list[Mode] = ["torch", "native"] if _native.library() else ["torch"]
needs_library = pytest.mark.skipif(_native.library() is None, reason="no compiled library")
KINDS: list[str] = list(MOMENTS)


def rule(kind: str, step: int, scale: float = 1.0, lr: float = 1e-2) -> StepRule:
    return StepRule(kind, lr, 0.9, 0.95, 1e-8, 0.1, step, scale)


def part(kind: str, size: int, real: torch.dtype, moment: torch.dtype, seed: int = 0) -> Part:
    draws = torch.Generator().manual_seed(seed)
    master = torch.randn(size, generator=draws, dtype=torch.float64).to(real)
    moments = [torch.rand(size, generator=draws, dtype=torch.float64).to(moment) for _ in MOMENTS[kind]]
    return Part(master, tuple(moments))


def gradients(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def copy(one: Part) -> Part:
    return Part(one.master.clone(), tuple(moment.clone() for moment in one.moments), one.group)


def bits(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest()


def state(one: Part) -> str:
    return bits(one.master, *one.moments)


@pytest.fixture
def all_isas() -> Iterator[Sequence[bytes]]:
    lib = _native.library()
    assert lib is not None
    before = lib.partool_isa()
    yield [name.encode() for name in _native.isas()]
    lib.partool_set_isa(before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_float64_steps_are_the_formulas(kind: str, mode: Mode) -> None:
    one = part(kind, 1003, torch.float64, torch.float64)
    p, moments = one.master.clone(), [moment.clone() for moment in one.moments]
    for step in range(1, 21):
        g = gradients(1003, torch.float64, step)
        update([one], step=UpdatePass([g], [rule(kind, step, 0.5, lr=0.1 / step)]), mode=mode)
        _formula(kind, p, moments, g * 0.5, step, 0.1 / step)
    torch.testing.assert_close(one.master, p, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(one.moments, moments, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def _formula(kind: str, p: torch.Tensor, moments: list[torch.Tensor], g: torch.Tensor, step: int, lr: float) -> None:
    first = moments[0]
    if kind == "adamw":
        first.copy_(0.9 * first + 0.1 * g)
        moments[1].copy_(0.95 * moments[1] + 0.05 * g * g)
        towards = first / (1 - 0.9**step) / ((moments[1] / (1 - 0.95**step)).sqrt() + 1e-8)
    elif kind == "lion":
        towards = (0.9 * first + 0.1 * g).sign()
        first.copy_(0.95 * first + 0.05 * g)
    elif kind == "adagrad":
        first.copy_(first + g * g)
        towards = g / (first.sqrt() + 1e-8)
    else:
        first.copy_(0.9 * first + g)
        towards = first
    p.copy_(p * (1 - lr * 0.1) - lr * towards)


@needs_library
def test_error_is_no_larger_than_that_of_torch_fused() -> None:
    size, draws = 20_003, torch.Generator().manual_seed(0)
    one = part("adamw", size, torch.float32, torch.float32)
    for moment in one.moments:
        moment.zero_()
    exact, wide = one.master.double(), [torch.zeros(size, dtype=torch.float64) for _ in range(2)]
    theirs = torch.nn.Parameter(one.master.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, 21):
        g = torch.randn(size, generator=draws)
        update([one], step=UpdatePass([g], [rule("adamw", step)]), mode="native")
        _formula("adamw", exact, wide, g.double(), step, 1e-2)
        theirs.grad = g
        optimizer.step()
    ours, peer = ((found.double() - exact).abs() for found in (one.master, theirs.detach()))
    assert ours.max() <= 1.1 * peer.max()
    assert ours.square().mean().sqrt() <= 1.1 * peer.square().mean().sqrt()


@needs_library
@settings(max_examples=5, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 15, 16, 17, 511, 512, 513, 2049, BLOCK, BLOCK + 1]), min_size=1, max_size=2),
    kind=st.sampled_from(KINDS),
    shift=st.integers(0, 3),
    types=st.tuples(st.sampled_from(DTYPES[:2]), st.booleans(), *[st.sampled_from(DTYPES)] * 3),
    seed=st.integers(0, 99),
)
def test_threads_builds_and_alignment_change_no_bit(
    sizes: list[int],
    kind: str,
    shift: int,
    types: tuple[torch.dtype, bool, torch.dtype, torch.dtype, torch.dtype],
    seed: int,
) -> None:
    lib = _native.library()
    assert lib is not None
    real, narrow, before, now, out = types
    before_isa, seen = lib.partool_isa(), set()
    try:
        for name, threads in itertools.product(_native.isas(), (1, 2, 3)):
            lib.partool_set_isa(name.encode())
            pool = Pool(threads)
            at = shift * threads % 4  # elements from an aligned address
            parts = [part(kind, n, real, torch.bfloat16 if narrow else real, seed) for n in sizes]
            moved = [Part(_moved(p.master, at), tuple(_moved(m, at) for m in p.moments)) for p in parts]
            weights = [_moved(torch.zeros(n, dtype=out), at) for n in sizes]
            steps = [
                UpdatePass(
                    [_moved(gradients(n, dtype, seed + k), at) for n in sizes], [rule(kind, 3 + k, 1.0 - 0.3 * k)]
                )
                for k, dtype in enumerate((before, now))
            ]
            found = update(
                moved,
                commit=steps[0],
                step=steps[1],
                keep=False,
                weights=weights,
                wants_sums=True,
                pool=pool,
                mode="native",
            )
            assert found == sums(steps[1].gradients, pool=pool, mode="native")
            seen.add((bits(*weights), tuple(map(state, moved)), found))
            pool.close()
    finally:
        lib.partool_set_isa(before_isa)
    assert len(seen) == 1


def _moved(tensor: torch.Tensor, at: int) -> torch.Tensor:
    room = tensor.new_zeros(tensor.numel() + at)
    room[at:] = tensor
    return room[at:]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16])
def test_a_step_put_off_is_the_step(kind: str, moment: torch.dtype, mode: Mode) -> None:
    size = 1703
    plain, late = part(kind, size, torch.float32, moment), part(kind, size, torch.float32, moment)
    out, expected = (torch.empty(size, dtype=torch.bfloat16) for _ in range(2))
    pending, done = None, 0
    for turn in range(12):
        g = gradients(size, torch.bfloat16, turn)
        if turn in (3, 8):  # an infinite gradient rejects the step
            g[turn * 100] = float("inf")
        commit, guess = pending, UpdatePass([g], [rule(kind, done + 1)])
        before = state(late)
        found = update([late], commit=commit, step=guess, keep=False, weights=[out], wants_sums=True, mode=mode)
        assert found is not None
        if commit is None:
            assert state(late) == before
        pending = None
        if not found.finite[0]:
            update([late], weights=[out], mode=mode)
            update([plain], weights=[expected], mode=mode)
        else:
            done += 1
            right = rule(kind, done, 0.25 if turn % 3 == 1 else 1.0)
            pending = UpdatePass([g], [right])
            if right.scale != 1.0:
                update([late], step=pending, keep=False, weights=[out], mode=mode)
            update([plain], step=pending, weights=[expected], mode=mode)
        assert bits(out) == bits(expected)
    update([late], commit=pending, mode=mode)
    assert state(late) == state(plain)


@pytest.mark.parametrize("mode", MODES)
def test_groups_follow_their_own_rules(mode: Mode) -> None:
    kinds: list[str] = ["adamw", "sgd", "lion"]
    rules = [rule(kind, 2, 1.0, 10.0**-index) for index, kind in enumerate(kinds)]
    parts = [part(kind, 100 + index, torch.float32, torch.float32) for index, kind in enumerate(kinds)]
    alone = [copy(one) for one in parts]
    together = [Part(one.master, one.moments, index) for index, one in enumerate(parts)]
    g = [gradients(len(one.master), torch.float32, 1) for one in parts]
    found = update(together, step=UpdatePass(g, rules), wants_sums=True, mode=mode)
    assert found == Sums(*zip(*(block_sums(one, mode) for one in g), strict=True))
    for one, expected, mine, ruled in zip(parts, alone, g, rules, strict=True):
        update([expected], step=UpdatePass([mine], [ruled]), mode=mode)
        assert state(one) == state(expected)


@needs_library
def test_kinds_may_differ_between_commit_and_step() -> None:
    one, other = part("sgd", 600, torch.float32, torch.float32), part("sgd", 600, torch.float32, torch.float32)
    g, h = gradients(600, torch.float32, 1), gradients(600, torch.float32, 2)
    first, then = UpdatePass([g], [rule("sgd", 1)]), UpdatePass([h], [rule("lion", 2)])
    update([one], commit=first, step=then, mode="native")
    update([other], step=first, mode="native")
    update([other], step=then, mode="native")
    assert state(one) == state(other)


@needs_library
def test_modes_of_the_thread_do_not_matter() -> None:
    # Subnormal moments, which a thread in flush-to-zero mode would flush.
    outcomes = set()
    for flush, pool in itertools.product((False, True), (None, Pool(2))):
        one = Part(torch.full((300,), 1e-38), (torch.full((300,), 1e-39), torch.full((300,), 1e-42)))
        torch.set_flush_denormal(flush)
        try:
            update([one], step=UpdatePass([torch.zeros(300)], [rule("adamw", 1)]), pool=pool, mode="native")
        finally:
            torch.set_flush_denormal(False)
        outcomes.add(state(one))
    assert len(outcomes) == 1


@needs_library
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_conversions_are_those_of_torch(source: torch.dtype, to: torch.dtype, all_isas: Sequence[bytes]) -> None:
    lib = _native.library()
    assert lib is not None
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[source.itemsize]
    x = torch.arange(-(2**15), 2**15).to(width) << (8 * (source.itemsize - 2))
    if source.itemsize > 2:  # ties and their neighbours, and values that overflow or underflow in narrow types
        x = torch.cat([x + offset for offset in (0, 2**12, 2**12 + 1, 2**15, 2**15 + 1)])
    x = x.view(source)
    if source == torch.float64:
        x = torch.cat([x, torch.randn(4096, dtype=source), x.float().double()])
    wanted = x.float().to(to) if to.itemsize == 2 else x.to(to)
    for name in all_isas:
        lib.partool_set_isa(name)
        found = torch.empty_like(x, dtype=to)
        accumulate([found], [x], first=True, mode="native")
        assert torch.equal(found.isnan(), x.isnan())
        assert bits(found[~x.isnan()]) == bits(wanted[~x.isnan()])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("into", DTYPES, ids=str)
def test_accumulation_adds(into: torch.dtype, source: torch.dtype, mode: Mode) -> None:
    totals = [gradients(n, into, n) for n in (1, 17, BLOCK + 3)]
    more = [gradients(n, source, n + 1) for n in (1, 17, BLOCK + 3)]
    wanted = [total.clone().add_(one) for total, one in zip(totals, more, strict=True)]
    accumulate(totals, more, first=False, mode=mode)
    for found, expected in zip(totals, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=torch.finfo(into).eps, atol=0.0)
        if into.itemsize >= source.itemsize:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_zeros(mode: Mode) -> None:
    tensors = [torch.ones(5, dtype=torch.float64), torch.ones(2 * BLOCK + 1), torch.ones(3, dtype=torch.float16)]
    zero(tensors, pool=Pool(2), mode=mode)
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_do(mode: Mode) -> None:
    assert update([], step=UpdatePass([], []), wants_sums=True, mode=mode) == Sums((), ())
    one = part("adamw", 0, torch.float32, torch.float32)
    found = update([one], step=UpdatePass([torch.empty(0)], [rule("adamw", 1)]), wants_sums=True, mode=mode)
    assert found == Sums(((),), (True,))
    assert sums([], mode=mode) == Sums((), ())
