"""Ranks of test_sequence_layers.py: decoders on shares of sequences against the same in one process, in float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _sequence_plans import LENGTH, sequence_plan

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool_runtime.data.batches import IGNORED_LABEL, MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import Ranks, open_ranks
from partool_runtime.model import Decoder
from partool_runtime.parallel.apply import compile_blocks
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.sequence.apply import apply_sequence
from partool_runtime.parallel.sequence.batches import SharedSequences
from partool_runtime.precision import MASTER_DTYPE

WORLD, BATCH = 4, 3
ZIGZAG = {"order": "zigzag"}
METHODS: dict[str, dict[str, Any]] = {
    "ulysses": {},
    "ring": ZIGZAG,
    "all_gather": {},
    "usp": ZIGZAG | {"inner": 2},
    "startrail": ZIGZAG | {"teams": 2},
}
WINDOWED: dict[str, dict[str, Any]] = {
    "ulysses": {},
    "ring": {},
    "all_gather": {},
    "usp": {"inner": 2},
    "startrail": {"teams": 2},
}


@dataclass(frozen=True)
class Case:
    model: str
    method: str
    fields: dict[str, Any] = field(default_factory=dict)
    policy: str = "none"
    documents: bool = False
    silent: bool = False
    """No token of the third rank has a label."""
    compiled: bool = False

    def plan(self) -> Plan:
        """Return the plan, of four ranks that share all sequences."""
        return sequence_plan(
            Path(), Mesh(cp=WORLD), self.method, model=self.model, recompute=self.policy, **self.fields
        )


class Pair:
    """A decoder on this rank's tokens, and the same decoder on all of them."""

    def __init__(self, case: Case, ranks: Ranks, seed: int = 0) -> None:
        plan = case.plan()
        torch.manual_seed(seed)
        self.whole = Decoder(plan.model).to(MASTER_DTYPE["fp64"])
        self.shared = copy.deepcopy(self.whole)
        team = apply_sequence(self.shared, plan, ranks)
        assert team is not None
        recompute(self.shared.layers, plan.layout.recompute)
        if case.compiled:
            compile_blocks(self.shared.layers)
        self.case, self.group, self.plan = case, team.opened or ranks.world, plan
        self.batch = micro_batch(plan, seed, documents=case.documents)
        if case.silent:
            self.batch.labels_BS[:, team.index(2)] = IGNORED_LABEL
        taken = Taken(self.shared)
        self.passes = SharedSequences(taken, plan.shares, team.rank)
        self.taken = taken

    def forward(self) -> None:
        """Compute the loss of this rank's tokens."""
        self.shared.zero_grad()
        self.passes.step([self.batch], torch.ones(()), lambda _: contextless())

    def backward(self) -> None:
        """Compute gradients."""
        self.taken.loss.backward()

    def compare(self) -> None:
        """Compare loss and gradients, summed over the ranks, with those of one process."""
        self.whole.zero_grad()
        extra = () if self.batch.documents_BL is None else (self.batch.documents_BL,)
        wanted = self.whole(self.batch.tokens_BS, self.batch.labels_BS, *extra)
        wanted.backward()
        self._same("loss", self.taken.loss.detach().clone(), wanted.detach())
        assert float(wanted.detach()) > 0
        shared = dict(self.shared.named_parameters())
        for name, parameter in self.whole.named_parameters():
            own = shared[name].grad
            assert parameter.grad is not None
            self._same(name, torch.zeros_like(parameter) if own is None else own.clone(), parameter.grad)

    def _same(self, what: str, mine: torch.Tensor, wanted: torch.Tensor) -> None:
        dist.all_reduce(mine, group=self.group)
        difference = float((mine - wanted).abs().max())
        assert difference <= 1e-12 * max(1.0, float(wanted.abs().max())), (self.case, what, difference)


class Taken:
    """Passes that only remember the loss."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.loss = torch.zeros(())

    def step(self, batch: list[MicroBatch], weight: torch.Tensor, timer: object) -> torch.Tensor:
        """See ``Passes``."""
        (micro,) = batch
        extra = () if micro.documents_BL is None else (micro.documents_BL,)
        self.loss = self._model(micro.tokens_BS, micro.labels_BS, *extra) * weight
        return self.loss


def contextless() -> Any:
    """Return a context that does nothing."""
    return pytest.MonkeyPatch.context()


def micro_batch(plan: Plan, seed: int, *, documents: bool) -> MicroBatch:
    """Return sequences that are the same on all ranks; documents begin at other places in each."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(plan.model.vocab, (BATCH, LENGTH + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    numbers = None
    if documents:
        numbers = (torch.rand(BATCH, LENGTH, generator=draw) > 0.7).cumsum(dim=1).to(torch.int32)
        labels[:, :-1][numbers[:, 1:] != numbers[:, :-1]] = IGNORED_LABEL
    return MicroBatch(tokens[:, :-1].clone(), labels, numbers)


def cases(*, every: bool) -> list[Case]:
    """Return decoders of all methods; ``every``: with all policies of recomputation, too."""
    found = [
        Case(model, method, fields, documents=documents)
        for method, fields in METHODS.items()
        for model, documents in (
            ("five", False), ("learned", True), ("one head of keys", False), ("three", True), ("grouped", True),
        )
    ]  # fmt: skip
    found += [
        Case("windows", method, fields, policy, documents=documents)
        for method, fields in WINDOWED.items()
        for documents, policy in ((False, "none"), (True, "full"))
    ]
    found += [Case("five", method, fields, silent=True) for method, fields in METHODS.items()]
    found += [
        Case(model, method, fields, documents=model == "latent")
        for model in (("latent", "latent-lite") if every else ("latent",))
        for method, fields in METHODS.items()
    ]
    policies = ("attention", "selective", "keep_attention", "full") if every else ("selective",)
    found += [
        Case(model, method, fields, policy, documents=True)
        for model in (("grouped", "latent") if every else ("grouped",))
        for method, fields in METHODS.items()
        for policy in policies
    ]
    return found


@cache
def ranks_of_world() -> Ranks:
    """Return the ranks of the pool."""
    return open_ranks(Case("five", "ulysses").plan())


def check(case: Case) -> None:
    """Run one decoder."""
    pair = Pair(case, ranks_of_world())
    pair.forward()
    pair.backward()
    pair.compare()


def check_two_at_once() -> None:
    """Two models whose passes take turns; nothing of the one may reach the other."""
    ranks = ranks_of_world()
    for (one, of_one), (other, of_other) in itertools.pairwise(METHODS.items()):
        pairs = [Pair(Case("grouped", one, of_one), ranks, 1), Pair(Case("windows", "ulysses"), ranks, 2)]
        pairs.append(Pair(Case("three", other, of_other, documents=True), ranks, 3))
        for pair in pairs:
            pair.forward()
        for pair in pairs:
            pair.backward()
        for pair in pairs:
            pair.compare()


def check_lost_window() -> None:
    """A wrapper that drops the window, or the documents, is found."""
    ranks = ranks_of_world()
    for method, fields in WINDOWED.items():
        for lose, documents in ((without_window, False), (without_documents, True)):
            pair = Pair(Case("windows", method, fields, documents=documents), ranks)
            for block in pair.shared.layers:
                block.attention.core = partial(lose, block.attention.core)  # type: ignore[operator,union-attr]
            pair.forward()
            pair.backward()
            with pytest.raises(AssertionError):
                pair.compare()
            dist.barrier()


def without_window(core: Callable[..., torch.Tensor], *arguments: Any, **named: Any) -> torch.Tensor:
    """Attend as if the layer had no window."""
    if "layout" in named:
        return core(*arguments, **named | {"layout": named["layout"]._replace(window=None)})
    q, k, v, layout, tokens = arguments
    return core(q, k, v, layout._replace(window=None), tokens)


def without_documents(core: Callable[..., torch.Tensor], *arguments: Any, **named: Any) -> torch.Tensor:
    """Attend as if all tokens were of one document."""
    tokens = copy.copy(named["tokens"] if "tokens" in named else arguments[4])
    tokens.documents_BL = None
    if "tokens" in named:
        return core(*arguments, **named | {"tokens": tokens})
    return core(*arguments[:4], tokens)


def check_refusals() -> None:
    """A batch of the wrong length is refused on all ranks, before anything is sent."""
    ranks = ranks_of_world()
    pair = Pair(Case("five", "ulysses"), ranks)
    short = MicroBatch(pair.batch.tokens_BS[:, 1:], pair.batch.labels_BS[:, 1:])
    with pytest.raises(ConfigurationError, match="PT651"):
        pair.passes.step([short], torch.ones(()), lambda _: contextless())
