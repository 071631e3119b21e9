"""Ranks of test_sequence_ring.py: rings, halos and gathered keys against one process, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from _ranks import group_of

from partool.cost.sequence import all_gather as sequence_gather
from partool.cost.sequence import ring as sequence_ring
from partool.cost.sequence.types import AttentionSizes, Sent
from partool.layout.sequence import Order, shares
from partool.plan.layout import Layout
from partool.spec.model import ModelConfig
from partool.spec.parallel import Recompute
from partool_runtime.model import Decoder, blocks
from partool_runtime.model import blocks as documents_of_blocks
from partool_runtime.model.attention import AttentionLayout, Tokens, visible
from partool_runtime.model.decoder import Block
from partool_runtime.parallel.comm import CommCounter
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.sequence import all_gather as gather
from partool_runtime.parallel.sequence import ring
from partool_runtime.parallel.sequence.all_gather import Gather
from partool_runtime.parallel.sequence.halo import WithHalo
from partool_runtime.parallel.sequence.op import ExchangeAttend
from partool_runtime.parallel.sequence.ring import KeyRing
from partool_runtime.parallel.sequence.types import Exchange, SequenceTeam

WORLD = 8
KEY_DIM = 4


class Case(NamedTuple):
    """One attention layer, shared by the first ranks of the world."""

    method: Literal["ring", "gather"]
    ranks: int
    queries: int
    keys: int
    length: int
    batch: int = 2
    window: int | None = None
    documents: bool = False
    order: Order = "zigzag"
    value_dim: int = KEY_DIM
    most_pairs: int = blocks.MOST_PAIRS
    """Query-key pairs that one mask covers."""
    short: int = documents_of_blocks.SHORT
    """Tokens of documents that masks tell apart."""


CASES = (
    Case("ring", 2, 4, 4, 16),
    Case("ring", 4, 7, 7, 17, batch=1),
    Case("ring", 5, 6, 2, 23),
    Case("ring", 3, 3, 1, 17, documents=True),
    Case("ring", 4, 4, 2, 17, documents=True, most_pairs=20, short=2),
    Case("ring", 4, 4, 2, 19, order="contiguous"),
    Case("ring", 5, 2, 1, 17, order="contiguous", documents=True),
    Case("ring", 5, 2, 2, 3, batch=3),
    Case("ring", 5, 2, 2, 4, order="contiguous"),
    Case("ring", 3, 4, 2, 17, value_dim=3),
    Case("ring", 3, 4, 2, 17, window=5, order="contiguous"),
    Case("ring", 5, 6, 3, 21, window=9, order="contiguous"),
    Case("ring", 5, 6, 3, 21, window=9, order="contiguous", most_pairs=7),
    Case("ring", 4, 2, 1, 19, window=6, order="contiguous", documents=True),
    Case("ring", 4, 4, 2, 33, window=4),
    Case("ring", 4, 4, 2, 33, window=13, documents=True),
    Case("ring", 3, 2, 2, 11, window=1),
    Case("ring", 3, 2, 2, 11, window=11),
    Case("ring", 5, 2, 1, 4, window=2, order="contiguous"),
    Case("ring", 8, 6, 3, 37, documents=True),
    Case("ring", 8, 2, 1, 37, window=7, order="contiguous"),
    Case("gather", 2, 4, 4, 16, order="contiguous"),
    Case("gather", 4, 7, 7, 17, batch=1, order="contiguous"),
    Case("gather", 5, 6, 2, 23),
    Case("gather", 4, 3, 1, 18, documents=True, order="contiguous"),
    Case("gather", 3, 4, 2, 17, documents=True, most_pairs=30),
    Case("gather", 5, 2, 2, 3, order="contiguous"),
    Case("gather", 3, 4, 2, 17, value_dim=3),
    Case("gather", 8, 6, 3, 37, documents=True),
    Case("gather", 4, 6, 3, 21, window=8, order="contiguous"),
)


def check_case(case: Case, number: int) -> None:
    """Compare one layer with one process, on the ranks of the case."""
    group = group_of(case.ranks)
    if dist.get_rank() < case.ranks:
        check(case, team_of(case, group), number)
        check_narrow(case, team_of(case, group), number)


def check_sent_again(case: Case) -> None:
    """Count what the backward pass of layers sends once more."""
    group = group_of(case.ranks)
    if dist.get_rank() < case.ranks:
        sent_again(case, team_of(case, group))


def team_of(case: Case, group: dist.ProcessGroup) -> SequenceTeam:
    """Return the ranks of a case."""
    dealt = shares(case.length, case.ranks, case.order)
    return SequenceTeam(group, dist.get_rank(), dealt, (tuple(range(case.ranks)),))


def exchange_of(case: Case, team: SequenceTeam) -> Exchange:
    """Return what the method of a case puts into layers."""
    return WithHalo(team, KeyRing(team) if case.method == "ring" else Gather(team))


def check(case: Case, team: SequenceTeam, seed: int) -> None:
    """Compare this rank's result and gradients with those of one process, and what is sent with the formula."""
    layout, whole, documents_BL = AttentionLayout(case.window), inputs(case, seed), documents(case, seed)
    grad_BNLV = random(seed + 1, case.batch, case.queries, case.length, case.value_dim)
    expected = reference(whole, grad_BNLV, layout, documents_BL)
    found, counted = run(case, team, whole, grad_BNLV, documents_BL)
    mine = torch.tensor(team.index(team.rank), dtype=torch.int64)
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        same(f"{case} {name}", a, b[:, :, mine])
    assert counted == list(formula(case, team).bytes(8)), (case, counted)


def check_narrow(case: Case, team: SequenceTeam, seed: int) -> None:
    """Check in bfloat16 what travels narrow and what wide, and that results are about right."""
    whole, documents_BL = inputs(case, seed), documents(case, seed)
    grad_BNLV = random(seed + 1, case.batch, case.queries, case.length, case.value_dim)
    expected = reference(whole, grad_BNLV, AttentionLayout(case.window), documents_BL)
    narrow = [x.bfloat16() for x in whole]
    found, counted = run(case, team, narrow, grad_BNLV.bfloat16(), documents_BL)
    mine = torch.tensor(team.index(team.rank), dtype=torch.int64)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.allclose(a.double(), b[:, :, mine], rtol=0.1, atol=0.1), case
    assert counted == list(formula(case, team).bytes(2)), (case, counted)


LAYERS = Case("ring", 3, 4, 2, 17, batch=1)
MODEL = ModelConfig(
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=KEY_DIM,
    ffn_hidden=8,
    vocab=11,
    window=4,
    layer_types=("sliding", "full"),
)
AGAIN: dict[Recompute, int] = {"none": 0, "attention": 1, "selective": 0, "keep_attention": 0, "full": 1}
"""Number of times that the backward pass repeats all sends of the forward pass, besides those it needs."""


def sent_again(case: Case, team: SequenceTeam) -> None:
    """Count what is sent under each policy of recomputation, which must not change any bit."""
    put = ring.put if case.method == "ring" else gather.put
    bits = []
    for policy, times in AGAIN.items():
        torch.manual_seed(0)
        model = Decoder(MODEL).double()
        model.contexts.share = (team.length, tuple(team.index(team.rank)))
        layers = [cast(Block, layer) for layer in model.layers]
        put(layers, team, Layout.model_construct())
        recompute(layers, [policy] * MODEL.layers)
        x = random(1, case.batch, case.length, MODEL.hidden)[:, team.index(team.rank)].requires_grad_()
        context, out = model.contexts(x), x
        with CommCounter() as counter:
            for layer in layers:
                out = layer(out, context)
            out.square().sum().backward()
        assert x.grad is not None
        bits.append([out.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())])
        counted = sum(traffic.sent_bytes for traffic in counter.snapshot().values())
        each = [formula(case._replace(window=window), team).bytes(8) for window in (MODEL.window, None)]
        assert counted == sum((1 + times) * sent + returned for sent, returned in each), (policy, counted, each)
    for others in bits[1:]:
        assert all(
            torch.equal(cast(torch.Tensor, a), cast(torch.Tensor, b)) for a, b in zip(bits[0], others, strict=True)
        )


def formula(case: Case, team: SequenceTeam) -> Sent:
    """Return what is to be sent."""
    heads = AttentionSizes(case.batch, case.queries, case.keys, KEY_DIM, case.value_dim, case.window)
    module = sequence_ring if case.method == "ring" else sequence_gather
    return module.sent(team.shares, heads, team.rank)


def run(
    case: Case,
    team: SequenceTeam,
    whole: Sequence[torch.Tensor],
    grad_BNLV: torch.Tensor,
    documents_BL: torch.Tensor | None,
) -> tuple[list[torch.Tensor], list[int]]:
    """Return this rank's result and gradients, and the bytes that it sent in both passes."""
    mine = torch.tensor(team.index(team.rank), dtype=torch.int64)
    heads = [x[:, :, mine].requires_grad_() for x in whole]
    attend = ExchangeAttend(exchange_of(case, team))
    blocks.MOST_PAIRS, documents_of_blocks.SHORT = case.most_pairs, case.short
    with CommCounter() as forward:
        out = attend(*heads, AttentionLayout(case.window), Tokens(case.length, mine, documents_BL))
    with CommCounter() as backward:
        out.backward(grad_BNLV[:, :, mine])
    blocks.MOST_PAIRS, documents_of_blocks.SHORT = (Case._field_defaults[name] for name in ("most_pairs", "short"))
    counted = [sum(traffic.sent_bytes for traffic in each.snapshot().values()) for each in (forward, backward)]
    gradients = [x.grad for x in heads if x.grad is not None]
    assert len(gradients) == len(heads)
    return [out.detach(), *gradients], counted


def inputs(case: Case, seed: int) -> list[torch.Tensor]:
    """Return queries, keys and values of whole sequences."""
    sizes = ((case.queries, KEY_DIM), (case.keys, KEY_DIM), (case.keys, case.value_dim))
    return [random(seed + 10 * place, case.batch, n, case.length, width) for place, (n, width) in enumerate(sizes)]


def random(seed: int, *shape: int) -> torch.Tensor:
    """Return the same random numbers on all ranks."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def documents(case: Case, seed: int) -> torch.Tensor | None:
    """Number documents of a few tokens each, other ones in each sequence."""
    if not case.documents:
        return None
    starts = random(seed + 7, case.batch, case.length) > 0.8
    return starts.cumsum(dim=1).to(torch.int32)


def reference(
    whole: Sequence[torch.Tensor], grad: torch.Tensor, layout: AttentionLayout, documents_BL: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return results and gradients of attention written out, without any kernel."""
    q, k, v = (x.clone().requires_grad_() for x in whole)
    places = torch.arange(q.shape[2])
    mask = visible(places, places, layout, documents=None if documents_BL is None else (documents_BL, documents_BL))
    each = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(each, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(each, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def same(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise AssertionError where two tensors differ by more than rounding."""
    assert a.shape == b.shape, (what, a.shape, b.shape)
    if b.numel():
        difference = float((a - b).abs().max())
        assert difference <= 1e-12 * max(1.0, float(b.abs().max())), (what, difference)
