"""Attention of blocks of queries and keys against plain attention, without a mask of all tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from partool.layout.reach import needed
from partool.layout.sequence import Spans, index, shares, tokens
from partool_runtime.errors import ConfigurationError
from partool_runtime.model import blocks, kernels
from partool_runtime.model.attention import Tokens, attend
from partool_runtime.model.blocks import BlockPair, Returned, Seen
from partool_runtime.model.kernels import Sight
from partool_runtime.model.operator import WHOLE
from partool_runtime.model.rectangles import Rectangle, joined, pieces, rectangles
from partool_runtime.model.visibility import AttentionLayout, visible
from partool_runtime.parallel.sequence.op import ExchangeAttend
from partool_runtime.torch_internals.tensors import TorchDispatchMode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def random_shares(draw: random.Random) -> tuple[int, tuple[Spans, ...]]:
    """Return the length of a sequence and its shards on some ranks."""
    length = draw.randint(1, 40)
    return length, shares(length, draw.randint(1, 5), draw.choice(("contiguous", "zigzag")))


# --- rectangles ---


def seen_in(rectangle: Rectangle, window: int | None) -> set[tuple[int, int]]:
    """Return the pairs of positions that a rectangle lets attend."""
    (first, past), (low, high) = rectangle.queries, rectangle.keys
    pairs = [(q, k) for q in range(past - first) for k in range(high - low)]
    if rectangle.kind == "causal":
        assert past - first == high - low
        pairs = [(q, k) for q, k in pairs if k <= q]
    elif rectangle.kind == "masked":
        away = rectangle.first_query - rectangle.first_key
        pairs = [(q, k) for q, k in pairs if 0 <= away + q - k < (window or 10**9)]
    return {(first + q, low + k) for q, k in pairs}


@pytest.mark.parametrize("seed", range(40))
def test_rectangles_hold_every_pair_that_sees_once(seed: int) -> None:
    """Every visible pair is in exactly one rectangle, whether cut, joined or in pieces."""
    draw = random.Random(seed)
    _, dealt = random_shares(draw)
    window, most = draw.choice((None, 1, 2, 5, 13, 50)), draw.choice((1, 10, 60))
    for queries in dealt:
        for keys in dealt:
            places = list(enumerate(index(queries))), list(enumerate(index(keys)))
            expected = {(i, j) for i, q in places[0] for j, k in places[1] if 0 <= q - k < (window or 10**9)}
            plain = rectangles(queries, keys, window)
            for parts in (plain, joined(queries, keys, window)):
                found = [pair for part in parts for pair in seen_in(part, window)]
                assert sorted(found) == sorted(expected)
            cut = [piece for part in plain for piece in pieces(part, window, most)]
            # A piece of a full rectangle has pairs of all kinds, which a mask distinguishes.
            assert sorted(pair for piece in cut for pair in seen_in(piece, window)) == sorted(expected)
            assert not plain or all(sizes_of(piece, most) for piece in cut)


def sizes_of(piece: Rectangle, most: int) -> bool:
    rows, columns = piece.queries[1] - piece.queries[0], piece.keys[1] - piece.keys[0]
    return rows == 1 or rows * columns <= most


@pytest.mark.parametrize("seed", range(20))
def test_needed_is_what_is_seen(seed: int) -> None:
    draw = random.Random(seed)
    _, dealt = random_shares(draw)
    window = draw.choice((None, 1, 3, 8, 60))
    for queries in dealt:
        for keys in dealt:
            expected = [k for k in index(keys) if any(0 <= q - k < (window or 10**9) for q in index(queries))]
            assert index(needed(queries, keys, window)) == expected


def test_ring_in_zigzag_order_needs_no_mask() -> None:
    """Half of the queries see all keys, or all queries half of the keys; one kernel call each but on the diagonal."""
    dealt = shares(64, 4, "zigzag")
    for rank, mine in enumerate(dealt):
        for source, theirs in enumerate(dealt):
            parts = joined(mine, theirs, None)
            assert all(part.kind != "masked" for part in parts)
            assert rank == source or [part.kind for part in parts] == ["all"], (rank, source, parts)


# --- forward and backward ---


def reference(
    heads: tuple[torch.Tensor, ...], layout: AttentionLayout, documents_BL: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's result and the log-sum-exp, computed plainly."""
    q, k, v = heads
    places = torch.arange(q.shape[2], device=q.device)
    mask = visible(places, places, layout, documents=None if documents_BL is None else (documents_BL, documents_BL))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = layout.scale or q.shape[3] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", ["fastest", "math"])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_in_any_order_equal_attention_written_out(
    seed: int, kernel: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    length, dealt = random_shares(draw)
    batch, keys, each = draw.choice((1, 2)), draw.choice((1, 2, 3)), draw.choice((1, 2, 3))
    layout = AttentionLayout(draw.choice((None, None, 1, 2, 5, 13, 50)), scale=draw.choice((None, 0.7)))
    widths = (8, 8, draw.choice((8, 5, 11)))
    documents_BL = torch.randint(0, 3, (batch, length)).sort(-1).values.int() if draw.random() < 0.6 else None
    monkeypatch.setattr(blocks, "MOST_PAIRS", draw.choice((1, 7, 40, 1 << 22)))
    monkeypatch.setattr(blocks, "SHORT", draw.choice((1, 5, 20)))
    if kernel == "math":
        monkeypatch.setattr(kernels, "_kernel", lambda *_: "math")
    whole = tuple(
        torch.randn(batch, n, length, width, dtype=torch.float64, device=device, requires_grad=True)
        for n, width in zip((keys * each, keys, keys), widths, strict=True)
    )
    out, lse = reference(whole, layout, documents_BL)
    grad = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, whole, grad)
    found_dk, found_dv = torch.zeros_like(dk), torch.zeros_like(dv)
    with torch.no_grad():
        for mine in dealt:
            rows = torch.tensor(index(mine), dtype=torch.int64, device=device)
            q, back = whole[0][:, :, rows], grad[:, :, rows]
            order = draw.sample(dealt, len(dealt))
            seen = Seen(q)
            for theirs in order:
                k, v = (x[:, :, index(theirs)] for x in whole[1:])
                seen.meet(k, v, BlockPair(mine, theirs, layout, documents_BL))
            same(seen.result()[0], out[:, :, rows])
            same(seen.result()[1], lse[:, :, rows])
            returned = Returned(q, back, *seen.result())
            for theirs in order:
                k, v = (x[:, :, index(theirs)] for x in whole[1:])
                parts = torch.zeros_like(k), torch.zeros_like(v)
                returned.meet((k, v), parts, BlockPair(mine, theirs, layout, documents_BL))
                found_dk[:, :, index(theirs)] += parts[0]
                found_dv[:, :, index(theirs)] += parts[1]
            same(returned.dq_BNQD, dq[:, :, rows])
    same(found_dk, dk)
    same(found_dv, dv)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape
    if b.numel():
        assert float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sight", ["all", "causal", "mask", "masks"])
@pytest.mark.parametrize("values", [16, 8, 24])
def test_kernels_of_every_type(dtype: torch.dtype, sight: str, values: int, device: str) -> None:
    """On a GPU these are other kernels than in float64; the masked cases include queries that see no key."""
    torch.manual_seed(0)
    queries, keys = (37, 37) if sight == "causal" else (37, 45)
    sizes = ((6, queries, 16), (2, keys, 16), (2, keys, values))
    q, k, v = (torch.randn(2, n, s, width, device=device).to(dtype) for n, s, width in sizes)
    mask = torch.rand(*([] if sight == "mask" else [2, 1]), queries, keys, device=device) > 0.4
    mask[..., 3, :] = False
    what = {"all": Sight(), "causal": Sight(causal=True)}.get(sight, Sight(mask=mask))
    out, lse = kernels.forward(q, k, v, what)
    expected_out, expected_lse = kernels._math(*(x.double() for x in (q, k, v)), what)
    assert lse.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)
    grad = torch.randn_like(out)
    # Backward over some of the keys, while result and log-sum-exp include others.
    total = torch.logaddexp(lse, torch.zeros_like(lse))
    share = (lse - total).exp()[..., None]
    of_all = (out * share + (1 - share)).to(dtype)
    found = kernels.backward(grad, (q, k, v), (of_all, total), what)
    wide = [x.double() for x in (grad, q, k, v, of_all, total)]
    expected = kernels._math_backward(wide[0], (wide[1], wide[2], wide[3]), (wide[4], wide[5]), what)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=10 * tolerance, atol=3 * tolerance)


@pytest.mark.parametrize("kernel", ["fastest", "math"])
def test_what_is_not_a_number_stays_so(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN query is not mistaken for one that sees no key."""
    if kernel == "math":
        monkeypatch.setattr(kernels, "_kernel", lambda *_: "math")
    q, k, v = (torch.ones(1, 1, 3, 8) for _ in range(3))
    q[0, 0, 1] = torch.nan
    mask = torch.tensor([[True] * 3, [True] * 3, [False] * 3])
    out, lse = kernels.forward(q, k, v, Sight(mask=mask))
    assert out[0, 0].isnan().all(dim=-1).tolist() == lse[0, 0].isnan().tolist() == [False, True, False]
    assert torch.equal(out[0, 0, 2], torch.zeros(8))
    assert lse[0, 0, 2] == -torch.inf


def test_values_may_be_of_another_width() -> None:
    q, k, v = (torch.randn(1, 2, 9, width, dtype=torch.float64, requires_grad=True) for width in (4, 4, 3))
    places = torch.arange(9)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible(places, places, AttentionLayout(3)))
    found = attend(q, k, v, AttentionLayout(3))
    same(found, expected)
    wanted = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for a, b in zip(torch.autograd.grad(found.sin().sum(), (q, k, v)), wanted, strict=True):
        same(a, b)


# --- documents ---


def test_nothing_is_computed_between_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long documents need no mask, short ones are grouped; their starts are read once."""
    monkeypatch.setattr(blocks, "MOST_PAIRS", 1000)
    monkeypatch.setattr(blocks, "SHORT", 8)
    lengths = ((40, 5, 2, 30, 3), (7, 50, 23))
    documents_BL = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
    asked: list[torch.Tensor] = []
    calls: list[tuple[int, int, bool]] = []

    def ask(x: torch.Tensor, most: int) -> Any:
        asked.append(x)
        return of_documents(x, most)

    def note(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((q.shape[2], k.shape[2], sight.mask is not None))
        return forward(q, k, v, sight)

    of_documents, forward = blocks._stretches, kernels.forward
    monkeypatch.setattr(blocks, "_stretches", ask)
    monkeypatch.setattr(kernels, "forward", note)
    q, k, v = (torch.randn(2, n, 80, 4, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1))
    expected, _ = reference((q, k, v), AttentionLayout(None), documents_BL)
    for _ in range(2):
        found = attend(q, k, v, AttentionLayout(None), Tokens(80, None, documents_BL))
        same(found, expected)
        found.sum().backward()
    assert len(asked) == 1
    once = [(40, 40, False), (7, 7, True), (30, 30, False), (3, 3, False), (7, 7, False), (50, 50, False)]
    assert calls == [*once, (23, 23, False)] * 2


def test_a_cpu_computes_few_pairs_of_different_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of packed conversations are short, and yet most of their pairs are of different conversations."""
    lengths = (300, 100, 60, 15, 40)
    documents_BL = torch.arange(5).repeat_interleave(torch.tensor(lengths))[None]
    calls: list[tuple[int, bool]] = []
    forward = kernels.forward

    def note(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((q.shape[2], sight.mask is not None))
        return forward(q, k, v, sight)

    monkeypatch.setattr(kernels, "forward", note)
    q, k, v = (torch.randn(1, n, 515, 4, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1))
    found = attend(q, k, v, AttentionLayout(None), Tokens(515, None, documents_BL))
    same(found, reference((q, k, v), AttentionLayout(None), documents_BL)[0])
    assert calls == [(300, False), (100, False), (115, True)]


def test_documents_written_in_place_are_looked_at_anew() -> None:
    documents_BL = torch.zeros(1, 2000, dtype=torch.int32)
    assert blocks.stretches(documents_BL, 512) == ((blocks.Stretch(0, 2000, alone=True),),)
    documents_BL[:, 900:] = 1
    parts = blocks.Stretch(0, 900, alone=True), blocks.Stretch(900, 2000, alone=True)
    assert blocks.stretches(documents_BL, 512) == (parts,)


def test_documents_that_come_back_are_told_apart_by_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_PAIRS", 10)
    documents_BL = torch.tensor([[0, 0, 1, 1, 0, 2, 2]])
    assert blocks.stretches(documents_BL, 512) is None
    q, k, v = (torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    found = attend(q, k, v, AttentionLayout(None), Tokens(7, None, documents_BL))
    same(found, reference((q, k, v), AttentionLayout(None), documents_BL)[0])


def test_rings_refuse_lines_of_a_grid() -> None:
    core, heads = ExchangeAttend(WHOLE), [torch.zeros(1, 1, 4, 2)] * 3
    with pytest.raises(ConfigurationError) as caught:
        core(*heads, AttentionLayout(None, "row"), Tokens(4, grid=(2, 2)))
    assert caught.value.code == "PT653"


# --- memory ---


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest number of elements in an operator's output."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, tuple | list) else (out,)
        self.elements = max([self.elements, *(x.numel() for x in found if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_no_mask_of_all_tokens(window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks stay below their size limit, however long the sequence."""
    monkeypatch.setattr(blocks, "MOST_PAIRS", 40_000)
    length, spans = 2000, ((0, 2000),)
    q = torch.randn(1, 1, length, 8)
    documents_BL = (torch.arange(length)[None] // 700).int() if packed else None
    meeting = BlockPair(spans, spans, AttentionLayout(window), documents_BL)
    assert tokens(spans) == length
    with Largest() as largest:
        seen = Seen(q)
        seen.meet(q, q, meeting)
        back = Returned(q, q, *seen.result())
        back.meet((q, q), (torch.zeros_like(q), torch.zeros_like(q)), meeting)
    assert largest.elements <= 42_000


def test_long_sequences_with_windows_keep_only_heads_and_logarithms() -> None:
    """Tensors saved by autograd for attention with documents and a window grow linearly with the tokens."""
    kept: dict[int, int] = {}
    for length in (64, 128):
        heads = [torch.randn(1, n, length, 8, requires_grad=True) for n in (4, 2, 2)]
        documents_BL = torch.zeros(1, length, dtype=torch.int32)
        sizes: list[int] = []

        def keep(x: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            attend(*heads, AttentionLayout(9), Tokens(length, None, documents_BL))
        kept[length] = sum(sizes)
    assert kept == {length: length * (4 * 8 + 2 * 2 * 8 + 4 * 8 + 4 + 1) for length in kept}
