"""One rank: a layer whose experts all ranks share, at the edges of what routers do. Fails by an assertion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from _ranks import joined
from torch import nn

from partool.cost.traffic.node_first import LevelBytes, NodeExchange
from partool.spec.experts import Moe
from partool.spec.model import ModelConfig
from partool_runtime.groups import Groups
from partool_runtime.model.moe import Dispatch, MixtureOfExperts
from partool_runtime.model.routing import Choices
from partool_runtime.parallel.comm import EXPERT, CommCounter
from partool_runtime.parallel.expert import dispatch
from partool_runtime.parallel.expert.dispatch import ExpertTeam, read_rows
from partool_runtime.parallel.expert.node_first import NodeFirst
from partool_runtime.parallel.expert.node_routes import NodeTeam
from partool_runtime.parallel.expert.padded import PaddedTeam

EXPERTS, HIDDEN = 8, 6
FEW = 0.6
"""Rows from each rank to each, as a multiple of an even share, with which choices are dropped."""
TOKENS: dict[str, tuple[int, ...]] = {
    "usual": (5, 3, 7, 4),
    "fewer tokens than experts": (1, 0, 1, 0),
    "ranks without tokens": (0, 6, 0, 0),
    "no tokens": (0, 0, 0, 0),
    "all to one expert": (4, 5, 1, 2),
    "some experts never": (6, 6, 6, 6),
    "some choices dropped": (5, 3, 7, 4),
    "all choices of a rank dropped": (5, 3, 7, 4),
    "every pair of experts": (28, 28, 28, 28),
}
"""Number of tokens of each of four ranks, by case."""


EVERY_PAIR = NodeExchange(
    tokens=28, choices=2, experts=EXPERTS, nodes=2, inside=2, visited=2 * (1 - 6 / 28), row_bytes=8 * HIDDEN,
    weight_bytes=8, summed=False,
)  # fmt: skip
"""What a rank exchanges if its tokens choose each pair of experts once: of 28 pairs, 6 have none of a node's four."""
ORDER = [
    "start", "wait",  # the numbers of rows
    "start", "shared", "wait",  # the rows
    "start", "wait",  # the results
    "start", "wait",  # the results' gradients
    "start", "shared backward", "wait",  # the rows' gradients
]  # fmt: skip
"""Order of exchanges and of the shared experts' passes, which run while rows and their gradients travel."""


@contextmanager
def noted(made: MixtureOfExperts) -> Iterator[list[str]]:
    """Note when exchanges start, when this rank waits for them, and when the shared experts run."""
    order: list[str] = []
    shared = made.shared
    assert shared is not None
    start, wait = dispatch.start_exchange, dispatch.finished

    def noting(title: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            order.append(title)
            return function(*arguments)

        return call

    dispatch.start_exchange, dispatch.finished = noting("start", start), noting("wait", wait)
    hooks = [
        shared.register_forward_hook(lambda *_: order.append("shared")),
        shared.up.weight.register_hook(lambda grad: order.append("shared backward")),
    ]
    try:
        yield order
    finally:
        dispatch.start_exchange, dispatch.finished = start, wait
        for hook in hooks:
            hook.remove()


def layer() -> MixtureOfExperts:
    moe = Moe(experts=EXPERTS, top_k=2, ffn_hidden=5, shared_experts=1)
    config = ModelConfig(layers=1, hidden=HIDDEN, ffn_hidden=8, heads=1, kv_heads=1, head_dim=6, vocab=11, moe=moe)
    torch.manual_seed(7)
    made = MixtureOfExperts(config).double()
    for parameter in made.parameters():
        parameter.data.normal_()
    return made


def few_rows(experts_TK: torch.Tensor, rows: int) -> torch.Tensor:
    """Return choices with −1 for those beyond ``rows`` rows to a rank, which are sorted by expert and then by token."""
    here, kept = EXPERTS // 4, torch.full_like(experts_TK, -1)
    for rank in range(4):
        places = [
            (token, choice)
            for expert in range(rank * here, (rank + 1) * here)
            for token, choice in (experts_TK == expert).nonzero().tolist()
        ]
        for token, choice in places[:rows]:
            kept[token, choice] = experts_TK[token, choice]
    return kept


def forced(name: str, tokens: int, rank: int, choices: Choices) -> Choices:
    """Return a router's choices as the case wants them."""
    name, _, limit = name.partition(", few rows of ")
    made = _forced(name, tokens, rank, choices)
    return made._replace(experts=few_rows(made.experts, int(limit))) if limit else made


def _forced(name: str, tokens: int, rank: int, choices: Choices) -> Choices:
    experts = choices.experts.clone()
    if name == "all to one expert":
        experts = torch.stack([torch.full((tokens,), 3), torch.full((tokens,), 5)], dim=1)
    elif name == "some experts never":
        experts = experts % 3
        experts[:, 1] = (experts[:, 0] + 1) % 3
    elif name == "every pair of experts":
        experts = torch.tensor(list(combinations(range(EXPERTS), 2)))
    elif name == "some choices dropped":
        experts[::2, 1] = -1
    elif name == "all choices of a rank dropped" and rank == 2:
        experts[:] = -1
    return Choices(experts, choices.weights)


def run(made: MixtureOfExperts, name: str, x_TH: torch.Tensor, rank_of_T: list[int]) -> torch.Tensor:
    """Return a layer's results for tokens, of which each belongs to a rank."""
    router = made.router
    plain = router.forward

    def routing(x_TH: torch.Tensor, sequences: int) -> Choices:
        choices = plain(x_TH, sequences)
        parts = [
            forced(name, rank_of_T.count(rank), rank, Choices(choices.experts[mine], choices.weights[mine]))
            for rank in sorted(set(rank_of_T))
            for mine in [[at for at, its in enumerate(rank_of_T) if its == rank]]
        ]
        return Choices(torch.cat([part.experts for part in parts]), choices.weights) if parts else choices

    router.forward = routing  # type: ignore[method-assign]
    out: torch.Tensor = made(x_TH[None])[0]
    out.square().sum().backward()
    return out


def main() -> None:
    joined()
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    levels = levels_of(Groups())
    for name, tokens in TOKENS.items():
        team = ExpertTeam(group.group_name, rank, tokens, read_rows)
        direct = check(name, tokens, team, ORDER)
        for summed in (False, True):
            node_team = NodeTeam(*levels, rank, 2, tokens, read_rows, summed=summed)
            expected = EVERY_PAIR._replace(summed=summed).sent(1, 1, 1) if name == "every pair of experts" else None
            values = check(f"{name}, node first", tokens, NodeFirst(node_team), None, expected)
            for other, value in zip(direct, values, strict=True):
                assert summed or torch.equal(other, value), f"{name}: bits differ from one exchange of all ranks"
        if all(tokens):  # a rank without tokens does not know how many rows others send
            check(f"{name}, all rows", tokens, PaddedTeam(group.group_name, rank, tokens, 4.0), None)
            check(f"{name}, few rows", tokens, PaddedTeam(group.group_name, rank, tokens, FEW), None)


def levels_of(groups: Groups) -> tuple[str, str]:
    """Return the names of the groups of four ranks in nodes of two: of the ranks of a place, and of a node."""
    opened = [groups.of(parts, EXPERT) for parts in ([(0, 2), (1, 3)], [(0, 1), (2, 3)])]
    rail, node = (group.group_name for group in opened if group is not None)
    return rail, node


def check(
    name: str, tokens: tuple[int, ...], dispatch: Dispatch, order: list[str] | None, sent: LevelBytes | None = None
) -> list[torch.Tensor]:
    """Compare a layer on four ranks with one process; return this rank's results and gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    case, _, way = name.partition(", ")
    alone_case = f"{case}, few rows of {ceil(FEW * 2 * max(tokens) / 4)}" if way == "few rows" else case
    whole_TH = torch.randn(sum(tokens), HIDDEN, dtype=torch.float64)
    first = sum(tokens[:rank])
    alone, mine = layer(), layer()
    x_TH, share_TH = (x.clone().requires_grad_() for x in (whole_TH, whole_TH[first : first + tokens[rank]]))
    wanted = run(alone, alone_case, x_TH, [at for at, count in enumerate(tokens) for _ in range(count)])
    for _, stacked in mine.experts.stacked():
        rows = len(stacked.weight) // ranks
        stacked.weight = nn.Parameter(stacked.weight.detach()[rank * rows : (rank + 1) * rows].clone())
    mine.dispatch = dispatch
    with CommCounter() as counter, noted(mine) as seen:
        got = run(mine, case, share_TH, [rank] * tokens[rank])
    close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
    close(got, wanted[first : first + tokens[rank]])
    close(share_TH.grad, _grad(x_TH)[first : first + tokens[rank]])
    _compare_weights(alone, mine, rank, ranks, close)
    if order is not None:
        assert seen == order, f"{name}: {seen}"
        calls = counter.snapshot()["all_to_all"].calls
        assert calls == 5, f"{name}: {calls} exchanges: numbers, rows, results, and both gradients"
    if sent is not None:
        levels = ((rank ^ 1, sent.inside), (rank ^ 2, sent.between))
        for other, wanted_bytes in levels:
            counted = counter.snapshot(among=(rank, other), described=EXPERT, exactly=True)["all_to_all"].sent_bytes
            assert counted == wanted_bytes, f"{name}: {counted} bytes, planned {wanted_bytes}"
    assert mine.experts.up.weight.shape[0] == EXPERTS // ranks * 5
    return [got, _grad(share_TH), *(_grad(parameter) for parameter in mine.parameters())]


def _compare_weights(alone: MixtureOfExperts, mine: MixtureOfExperts, rank: int, ranks: int, close: Any) -> None:
    for (_, whole), (_, part) in zip(alone.experts.stacked(), mine.experts.stacked(), strict=True):
        rows = len(whole.weight) // ranks
        assert part.weight.grad is not None, "a stack of experts without a gradient"
        close(part.weight.grad, _grad(whole.weight)[rank * rows : (rank + 1) * rows])
    summed = _grad(mine.router.weight).clone()
    dist.all_reduce(summed)
    close(summed, _grad(alone.router.weight))


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
