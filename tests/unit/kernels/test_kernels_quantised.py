"""Matrices in 4 and 8 bits: bits of bitsandbytes, any cut of the matrix, and one form for all kernels."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from _quantised import SHAPES, TYPES, matrix, name, word
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.layout import quantised as layout
from partool_kernels import _native, isa
from partool_kernels.quantised import codes as forms
from partool_kernels.quantised.codes import (
    PartPlace,
    packed,
    quantise_int8,
    quantise_nf4,
    quantise_scales,
    reference,
    scales_of,
    unpacked,
)
from partool_kernels.quantised.op import Stored, dequantise, grouped, linear

RECORDED = json.loads((Path(__file__).parents[2] / "data/quantised/bitsandbytes.json").read_text())
"""Hashes of what bitsandbytes 0.50.2 makes of the same matrices (tests/peers/_judge_bitsandbytes.py)."""
NOTHING = torch.empty(0)


def whole(shape: tuple[int, int]) -> PartPlace:
    return PartPlace(shape[1], (0, shape[1]), ((0, shape[0]),))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: str) -> None:
    torch.set_num_threads(1)
    values, kind = matrix(*shape, dtype), getattr(torch, dtype)
    four = quantise_nf4(values)
    double = quantise_scales(four.absmax)
    bytes_of_four, place = packed(four.codes), whole(shape)
    made = {
        "nf4 codes": bytes_of_four,
        "nf4 absmax": four.absmax,
        "nf4 numbers": dequantise(Stored(bytes_of_four, four.absmax, NOTHING, place.flat()), kind),
        "double absmax": double.codes,
        "double seconds": double.seconds,
        "double numbers": dequantise(Stored(bytes_of_four, double.codes, double.seconds, place.flat()), kind),
    }
    rows = values[values.any(1)]
    eight = quantise_int8(rows)
    made |= {"int8 codes": eight.codes, "int8 absmax": eight.absmax}
    made["int8 numbers"] = dequantise(Stored(*eight, NOTHING, whole((len(rows), shape[1])).flat()), torch.float32)
    assert {key: word(tensor.flatten()) for key, tensor in made.items()} == RECORDED[name(shape, dtype)]


def test_short_blocks_are_divided_and_others_multiplied() -> None:
    """A pair for which the two ways differ, and what bitsandbytes 0.50.2 returns for it."""
    largest, other = float.fromhex("0x1.4ccd8cp+0"), float.fromhex("0x1.402b9ep-3")
    block = torch.zeros(1, 64)
    block[0, :2] = torch.tensor([largest, other])
    assert packed(quantise_nf4(block[:, :2]).codes).tolist() == [[0xF8]]
    assert packed(quantise_nf4(block).codes)[0, 0] == 0xF9


def test_zeros_stay_zeros() -> None:
    for quantise in (quantise_nf4, quantise_int8):
        codes, absmax = quantise(torch.zeros(3, 70))
        stored = packed(codes) if quantise is quantise_nf4 else codes
        assert not dequantise(Stored(stored, absmax, NOTHING, whole((3, 70)).flat()), torch.float32).any()


def parts_of(values: torch.Tensor, base: str, rows: list[tuple[int, int]], columns: tuple[int, int]) -> Stored:
    """Return a rank's part of a matrix in few bits."""
    place = PartPlace(values.shape[1], columns, tuple(rows))
    codes, absmax = (quantise_int8 if base == "int8" else quantise_nf4)(values)
    seconds = NOTHING
    if base == "double":
        absmax, seconds = quantise_scales(absmax)
    at = torch.cat([torch.arange(*span) for span in rows])
    mine, blocks = codes[at, columns[0] : columns[1]], slice(*place.blocks)
    if base == "int8":
        return Stored(mine, absmax[at], seconds, place.flat())
    return Stored(packed(mine), absmax[at, blocks], seconds, place.flat())


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    base=st.sampled_from(["nf4", "double", "int8"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 333)),
)
def test_any_cut_has_the_numbers_of_the_whole(data: Any, base: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Of rows and of columns, whatever blocks these cut; the compiled library and torch's operators give equal bits."""
    values = matrix(*shape, "float32")
    start, stop = sorted(data.draw(st.tuples(st.integers(0, shape[1]), st.integers(0, shape[1]))))
    cut = sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=4)))
    rows = list(pairwise(cut))
    every = parts_of(values, base, [(0, shape[0])], (0, shape[1]))
    numbers, mine = dequantise(every, dtype, "torch"), parts_of(values, base, rows, (start, stop))
    at = torch.cat([torch.arange(*span) for span in rows])
    for mode in ("auto", "torch"):
        assert torch.equal(dequantise(mine, dtype, mode), numbers[at, start:stop])


@pytest.mark.skipif(isa() is None, reason="nothing was compiled: a C++ compiler is missing")
def test_all_builds_give_the_same_bits() -> None:
    lib, before = _native.library(), _native.isa()
    assert lib is not None
    assert before is not None
    values = matrix(5, 333, "float32")
    try:
        for build in _native.isas():
            assert lib.partool_set_isa(build.encode()) == 0
            for base in ("nf4", "int8"):
                part = parts_of(values, base, [(1, 4)], (7, 330))
                for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                    assert torch.equal(dequantise(part, dtype), dequantise(part, dtype, "torch")), (build, base, dtype)
    finally:
        lib.partool_set_isa(before.encode())
    assert lib.partool_dequantise(None, 5, None, 0, 0, 0, None, 0) == -1
    assert lib.partool_dequantise(None, 4, None, 0, 0, 64, None, 0) == -1


@pytest.mark.parametrize("base", ["nf4", "double", "int8"])
def test_products_and_gradients_are_those_of_the_numbers(base: str) -> None:
    part = parts_of(matrix(6, 133, "float32"), base, [(0, 6)], (0, 133))
    numbers, generator = dequantise(part, torch.float64), torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 133, generator=generator, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64)
    out = linear(x, part)
    torch.testing.assert_close(out, x @ numbers.T)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], grad @ numbers)
    rows, ends = x[0].detach().requires_grad_(), torch.tensor([2, 2, 4])
    out, of_rows = grouped(rows, part, ends), grad[0, :, :2]
    expected, of_x = torch.zeros_like(out), torch.zeros_like(rows)
    for at, expert in ((slice(0, 2), numbers[:2]), (slice(2, 4), numbers[4:])):
        expected[at], of_x[at] = rows[at] @ expert.T, of_rows[at] @ expert
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, rows, of_rows)[0], of_x)


def test_nothing_wide_is_kept_for_the_backward_pass() -> None:
    part = parts_of(matrix(64, 128, "float32"), "nf4", [(0, 64)], (0, 128))
    x, kept = torch.randn(3, 128, requires_grad=True), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.itemsize)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(x, part)
    assert 0 < sum(kept) <= sum(each.numel() * each.itemsize for each in part[:3])


def test_sizes_are_those_of_the_layout() -> None:
    """The planner's list of tensors, of which the runtime allocates."""
    assert (forms.NF4_BLOCK, forms.SCALES_BLOCK) == (layout.NF4_BLOCK, layout.SCALES_BLOCK)
    from partool.spec.adapter import LowRank

    for base, double in (("nf4", False), ("nf4", True), ("int8", True)):
        part = parts_of(matrix(7, 333, "float32"), "double" if base == "nf4" and double else base, [(0, 7)], (0, 333))
        adapter = LowRank(base=base, double_quant=double)
        listed = {each.name: (each.shape, each.element_bytes) for each in layout.stored_tensors(adapter, (7, 333))}
        tensors = {"codes": part.codes, "absmax": part.absmax, "seconds": part.seconds}
        made = {key: (tuple(each.shape), each.itemsize) for key, each in tensors.items() if each.numel()}
        assert listed == made


def test_packing_keeps_the_codes() -> None:
    codes = torch.arange(21, dtype=torch.uint8).view(3, 7) % 16
    assert torch.equal(unpacked(packed(codes), 7), codes)
    assert reference(packed(codes), torch.ones(3, 1), whole((3, 7)), torch.float32)[0, 0] == -1.0
    assert scales_of(torch.ones(3, 1), NOTHING, whole((3, 7))).dtype == torch.float32
