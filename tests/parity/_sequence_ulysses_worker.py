"""Ranks of test_sequence_ulysses.py: attention over exchanged heads against that of one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from _ranks import group_of, joined

from partool.cost.sequence.types import AttentionSizes, Sent
from partool.cost.sequence.ulysses import sent as sent_by_ulysses
from partool.cost.sequence.usp import sent as sent_by_usp
from partool.layout.sequence import Order, shares
from partool.plan.layout import Layout
from partool.spec.model import ModelConfig
from partool.spec.parallel import Recompute
from partool_runtime import deferral
from partool_runtime.model import Decoder
from partool_runtime.model.attention import AttentionLayout, Tokens, attend, visible
from partool_runtime.parallel.comm import SEQUENCE, CommCounter
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.sequence import exchange, ulysses, usp
from partool_runtime.parallel.sequence.exchange import HeadExchange
from partool_runtime.parallel.sequence.halo import WithHalo
from partool_runtime.parallel.sequence.op import ExchangeAttend
from partool_runtime.parallel.sequence.ring import KeyRing
from partool_runtime.parallel.sequence.types import SequenceTeam
from partool_runtime.parallel.sequence.ulysses import WholeSequences
from partool_runtime.torch_internals.collectives import finished, start_exchange

WORLD = 8
KEY_DIM, VALUE_DIM = 4, 3
SIZES: dict[str, Any] = {"layers": 2, "hidden": 10, "ffn_hidden": 7, "vocab": 11, "init_std": 0.3}


class Case(NamedTuple):
    ranks: int
    queries: int
    keys: int
    length: int
    batch: int = 2
    window: int | None = None
    documents: bool = False
    order: Order = "contiguous"
    inner: int = 0
    """Ranks of Ulysses inside of a ring; 0: there is no ring."""


ULYSSES = (
    Case(4, 7, 7, 16),
    Case(4, 3, 3, 18),
    Case(3, 20, 20, 17, batch=3),
    Case(2, 12, 3, 17, window=5),
    Case(4, 6, 2, 17, documents=True),
    Case(4, 7, 1, 17, window=2, documents=True),
    Case(3, 6, 6, 17, batch=1, window=40),
    Case(4, 2, 1, 3),
    Case(8, 12, 4, 19, order="zigzag", window=3),
    Case(8, 5, 5, 17),
)

USP = (
    Case(4, 7, 7, 16, order="zigzag", inner=2),
    Case(4, 3, 3, 18, order="zigzag", inner=2, documents=True),
    Case(6, 7, 1, 17, order="zigzag", inner=3, batch=3),
    Case(4, 6, 2, 17, inner=2, window=5),
    Case(4, 5, 5, 17, inner=2, window=30, documents=True),
    Case(8, 12, 3, 19, order="zigzag", inner=2),
    Case(8, 3, 3, 17, order="zigzag", inner=4, window=9),
    Case(6, 4, 2, 5, order="zigzag", inner=2),
)


def team_of(case: Case) -> SequenceTeam | None:
    """Return the team of a case, the first ranks of the world; None on the others."""
    group, members = group_of(case.ranks), tuple(range(case.ranks))
    if dist.get_rank() >= case.ranks:
        return None
    dealt = shares(case.length, case.ranks, case.order, inner=max(case.inner, 1))
    return SequenceTeam(group, dist.get_rank(), dealt, (members,))


def check_ulysses(case: Case, number: int) -> None:
    """Compare attention behind exchanges of heads with one process."""
    if (team := team_of(case)) is not None:
        check(case, team, partial(through_ulysses, team), sent_by_ulysses, number)


def through_ulysses(
    team: SequenceTeam, heads: Sequence[torch.Tensor], layout: AttentionLayout, tokens: Tokens
) -> torch.Tensor:
    q, k, v = heads
    heads_for_tokens = HeadExchange(team.group.group_name, team.rank, team.shares)
    return heads_for_tokens(q, k, v, partial(WholeSequences(attend), layout=layout, tokens=tokens))


def usp_of_all_teams(case: Case, number: int) -> None:
    """Check as many teams at once as there are ranks for; the others only take part in opening groups."""
    joined()
    everyone = tuple(tuple(range(at, at + case.ranks)) for at in range(0, WORLD - case.ranks + 1, case.ranks))
    place, dealt = dist.get_rank() % case.ranks, shares(case.length, case.ranks, case.order, inner=case.inner)
    team = SequenceTeam(dist.group.WORLD, place, dealt, everyone)
    if dist.get_rank() >= case.ranks * len(everyone):
        groups, rings = usp.sets(case.ranks, case.inner)
        for sets in (groups, rings):
            assert team.groups.of(usp.of_teams(team, sets), SEQUENCE) is None
        return
    inner, outer = usp.split(team, case.inner)
    core = ExchangeAttend(WithHalo(outer, KeyRing(outer)))

    def through(heads: Sequence[torch.Tensor], layout: AttentionLayout, tokens: Tokens) -> torch.Tensor:
        q, k, v = heads
        return inner(q, k, v, partial(core, layout=layout, tokens=tokens))

    check(case, team, through, partial(sent_by_usp, inner=case.inner), number)


def check(
    case: Case,
    team: SequenceTeam,
    through: Callable[..., torch.Tensor],
    formula: Callable[..., Sent],
    seed: int,
) -> None:
    """Compare this rank's results and gradients with those of one process, and what is sent with a formula."""
    layout, whole, documents_BL = AttentionLayout(case.window), inputs(case, seed), documents(case, seed)
    grad_BNLV = random(seed + 1, case.batch, case.queries, case.length, VALUE_DIM)
    expected = reference(whole, grad_BNLV, layout, documents_BL)
    mine = torch.tensor(team.index(team.rank), dtype=torch.int64)
    heads = [x[:, :, mine].requires_grad_() for x in whole]
    tokens = Tokens(case.length, mine, documents_BL)
    with CommCounter() as forward:
        out = through(heads, layout, tokens)
    with CommCounter() as backward:
        out.backward(grad_BNLV[:, :, mine])
    found = [out, *(x.grad for x in heads)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        same(f"{case} {name}", None if a is None else a.detach(), b[:, :, mine])
    sizes = AttentionSizes(case.batch, case.queries, case.keys, KEY_DIM, VALUE_DIM, case.window)
    counted = [sum(t.sent_bytes for t in counter.snapshot().values()) for counter in (forward, backward)]
    assert counted == list(formula(team.shares, sizes, team.rank).bytes(8)), (case, counted)


MODELS = (
    ModelConfig(
        **SIZES,
        heads=12,
        kv_heads=4,
        head_dim=2,
        qk_norm=True,
        qkv_bias=True,
        window=3,
        layer_types=("sliding", "full"),
    ),
    ModelConfig(**SIZES, heads=3, kv_heads=3, head_dim=4, position="learned", max_position=17, norm="layernorm"),
)


def layers_of_two_models() -> None:
    """Run layers of two models in turns, whose heads differ; nothing of the one may reach the other."""
    team = team_of(Case(4, 0, 0, 17))
    if team is None:
        return
    pairs = [Layers(team, config, seed) for seed, config in enumerate(MODELS)]
    for layers in pairs:
        layers.forward()
    for layers in pairs:
        layers.backward()
    overlapped = [layers.found() for layers in pairs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "start_exchange", lambda *sent: finished(start_exchange(*sent)))
        for layers in pairs:
            layers.forward()
            layers.backward()
    for layers, before in zip(pairs, overlapped, strict=True):
        layers.compare()
        assert all(torch.equal(a, b) for a, b in zip(before, layers.found(), strict=True)), "waiting changes bits"
    order_of_exchanges(pairs[0])
    no_zeros_for_what_came(pairs[0])
    exchanged_again(team)


class Layers:
    """The layers of a decoder on this rank's tokens, and of the same decoder on all tokens."""

    def __init__(self, team: SequenceTeam, config: ModelConfig, seed: int, policy: Recompute = "none") -> None:
        torch.manual_seed(seed)
        self.team = team
        self.whole = Decoder(config).double()
        self.shared = copy.deepcopy(self.whole)
        self.shared.contexts.share = (team.length, tuple(team.index(team.rank)))
        ulysses.put(list(self.shared.layers), team, Layout.model_construct())
        recompute(self.shared.layers, [policy] * config.layers)
        self.x = random(seed, 2, team.length, config.hidden)
        self.mine = torch.tensor(team.index(team.rank))

    def forward(self) -> None:
        """Run the layers on this rank's tokens."""
        self.shared.zero_grad()
        self.input = self.x[:, self.mine].requires_grad_()
        self.out = self.run(self.shared, self.input)

    def run(self, model: Decoder, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers of a model make of a hidden state."""
        context = model.contexts(x)
        for layer in model.layers:
            x = layer(x, context)
        return x

    def backward(self) -> None:
        """Run backward from a loss that weighs every element otherwise."""
        (self.out * self.x[:, self.mine].cos()).sum().backward()

    def found(self) -> list[torch.Tensor]:
        """Return the result, the input's gradient, and those of the parameters, of this rank's tokens."""
        return [self.out.detach(), self.input.grad, *(p.grad.clone() for p in self.shared.layers.parameters())]

    def compare(self) -> None:
        """Compare with one process."""
        whole = self.x.clone().requires_grad_()
        out = self.run(self.whole, whole)
        (out * self.x.cos()).sum().backward()
        mine, dx, *grads = self.found()
        same("layers", mine, out.detach()[:, self.mine])
        same("gradient of the input", dx, whole.grad[:, self.mine])
        for grad, (name, parameter) in zip(grads, self.whole.layers.named_parameters(), strict=True):
            dist.all_reduce(grad, group=self.team.group)
            same(name, grad, parameter.grad)


def order_of_exchanges(layers: Layers) -> None:
    """Check that the next projection is computed while the last one travels, and backward likewise."""
    attention, log = layers.shared.layers[1].attention, []
    hooks = [getattr(attention, name).register_forward_hook(lambda *_, name=name: log.append(name)) for name in "kqv"]
    hooks += [
        getattr(attention, name).register_full_backward_hook(lambda *_, name=name: log.append(name)) for name in "kqv"
    ]
    real = deferral.of_weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "start_exchange", lambda *sent: (log.append("start"), start_exchange(*sent))[1])
        patch.setattr(exchange, "finished", lambda x: (log.append("end"), finished(x))[1])
        patch.setattr(deferral, "of_weight", lambda *pair: (log.append("o"), real(*pair))[1])
        x = layers.input.detach().requires_grad_()
        out = attention(x, layers.shared.contexts(x))
        assert log == ["k", "start", "q", "start", "v", "start", "end", "end", "end", "start", "end"], log
        log.clear()
        out.sum().backward()
        assert log == ["start", "o", "end", "start", "start", "start", "end", "v", "end", "q", "end", "k"], log
    for hook in hooks:
        hook.remove()


def no_zeros_for_what_came(layers: Layers) -> None:
    """Check that autograd makes no gradients of buffers, as large as these, which nobody reads."""
    given: list[torch.Tensor | None] = []
    real = exchange._Start.backward
    with pytest.MonkeyPatch.context() as patch:
        noted = staticmethod(lambda ctx, grad, unread: (given.append(unread), real(ctx, grad, unread))[1])
        patch.setattr(exchange._Start, "backward", noted)
        layers.forward()
        layers.backward()
    assert given == [None] * 3 * layers.whole.config.layers, given


EXCHANGES = {"none": 8, "attention": 8, "selective": 8, "keep_attention": 8, "full": 12}
"""Per layer and step; only ``full`` sends again in the backward pass what it sent before."""


def exchanged_again(team: SequenceTeam) -> None:
    """Count exchanges under each policy of recomputation, which must not change any bit."""
    bits = []
    for policy, exchanges in EXCHANGES.items():
        layers = Layers(team, MODELS[0], 0, policy)
        with CommCounter() as counter:
            layers.forward()
            layers.backward()
        bits.append(layers.found())
        calls = counter.snapshot()["all_to_all"].calls
        assert calls == exchanges * MODELS[0].layers, (policy, calls)
    assert all(torch.equal(a, b) for other in bits[1:] for a, b in zip(bits[0], other, strict=True))


def inputs(case: Case, seed: int) -> list[torch.Tensor]:
    sizes = ((case.queries, KEY_DIM), (case.keys, KEY_DIM), (case.keys, VALUE_DIM))
    return [random(seed + 10 * place, case.batch, n, case.length, width) for place, (n, width) in enumerate(sizes)]


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def documents(case: Case, seed: int) -> torch.Tensor | None:
    """Number documents of a few tokens each, other ones in each sequence."""
    if not case.documents:
        return None
    starts = random(seed + 7, case.batch, case.length) > 0.5
    return starts.cumsum(dim=1).to(torch.int32)


def reference(
    whole: Sequence[torch.Tensor], grad: torch.Tensor, layout: AttentionLayout, documents_BL: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return results and gradients of attention written out, without any kernel."""
    q, k, v = (x.clone().requires_grad_() for x in whole)
    places = torch.arange(q.shape[2])
    pair = None if documents_BL is None else (documents_BL, documents_BL)
    mask = visible(places, places, layout, documents=pair)
    each = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(each, 1).transpose(2, 3) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = weights @ v.repeat_interleave(each, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def same(what: str, a: torch.Tensor | None, b: torch.Tensor) -> None:
    """Raise AssertionError where two tensors differ by more than rounding."""
    assert a is not None
    assert a.shape == b.shape, (what, a.shape, b.shape)
    if b.numel():
        difference = float((a - b).abs().max())
        assert difference <= 1e-12 * max(1.0, float(b.abs().max())), (what, difference)
