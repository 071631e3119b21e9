"""Permutation of tokens by expert as operators: results of the torch fallback, and refused inputs."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.moe.op import Routing, permute, route, unpermute


def _chosen() -> torch.Tensor:
    # Expert 2 gets no token; experts 5 and -1 are not on this rank; one token has chosen the same expert twice.
    return torch.tensor([[0, 3], [3, 1], [-1, 0], [1, 5], [0, 0], [5, -1]])


def test_rows_of_an_expert_lie_together_in_the_order_of_tokens() -> None:
    places, ends = routing = route(_chosen(), 4)
    assert ends.tolist() == [4, 6, 6, 8]
    assert routing.counts.tolist() == [4, 2, 0, 2]
    assert sorted(places.flatten().tolist()) == list(range(12))
    assert places.tolist() == [[0, 6], [7, 4], [8, 1], [5, 9], [2, 3], [10, 11]]


def test_permuted_rows_are_copies_and_what_is_not_here_is_zero() -> None:
    x, routing = torch.randn(6, 5), route(_chosen(), 4)
    x[5] = torch.nan  # a token with both experts on other ranks
    rows = permute(x, routing)
    assert torch.equal(rows[:8], x[torch.tensor([0, 2, 4, 4, 1, 3, 0, 1])])
    assert rows[8:].eq(0).all()
    rows[8:] = torch.nan
    out = unpermute(rows, routing)
    assert torch.equal(out, torch.stack([2 * x[0], 2 * x[1], x[2], x[3], 2 * x[4], torch.zeros(5)]))


def test_operators_are_what_their_registrations_say() -> None:
    torch.manual_seed(0)
    places, ends = routing = route(_chosen(), 4)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.partool.moe_permute, (x, places, ends, "auto"))
    torch.library.opcheck(torch.ops.partool.moe_unpermute, (rows, places, ends, weights, "auto"))
    torch.library.opcheck(torch.ops.partool.moe_unpermute, (rows, places, ends, None, "auto"))
    inputs = (x.detach(), rows.detach(), places, ends, weights.detach(), "auto")
    torch.library.opcheck(torch.ops.partool.moe_unpermute_backward, inputs)
    assert torch.autograd.gradcheck(lambda x: permute(x, routing), (x,))
    assert torch.autograd.gradcheck(lambda rows: unpermute(rows, routing), (rows,))
    assert torch.autograd.gradcheck(lambda rows, weights: unpermute(rows, routing, weights), (rows, weights))


def test_a_layer_of_experts_equals_every_token_by_itself() -> None:
    torch.manual_seed(1)
    x, chosen, weights = torch.randn(7, 6).double(), torch.randint(0, 5, (7, 3)), torch.rand(7, 3).double()
    experts = torch.randn(5, 6, 6).double()
    routing = route(chosen, 5)
    rows = permute(x, routing)
    parts = [rows[end - count : end] @ matrix for end, count, matrix in zip(*_spans(routing), experts, strict=True)]
    found = unpermute(torch.cat(parts), routing, weights)
    alone = torch.stack(
        [sum(weights[t, k] * (x[t] @ experts[chosen[t, k]]) for k in range(3)) for t in range(7)]  # type: ignore[misc]
    )
    assert torch.allclose(found, alone, rtol=1e-12, atol=1e-12)


def _spans(routing: Routing) -> tuple[list[int], list[int]]:
    return routing.ends.tolist(), routing.counts.tolist()


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_tokens_and_no_expert_here(tokens: int) -> None:
    routing = route(torch.full((tokens, 2), 7), 3)
    x = torch.randn(tokens, 8, requires_grad=True)
    out = unpermute(permute(x, routing), routing, torch.ones(tokens, 2))
    out.sum().backward()
    assert out.shape == (tokens, 8)
    assert out.eq(0).all()
    assert x.grad is not None
    assert x.grad.eq(0).all()


def test_what_cannot_be_permuted_is_refused() -> None:
    routing = route(_chosen(), 4)
    with pytest.raises(ValueError, match=r"\[2\] int64"):
        route(torch.tensor([1, 2]), 4)
    with pytest.raises(ValueError, match="experts: 0"):
        route(_chosen(), 0)
    with pytest.raises(ValueError, match=r"\[5, 3\] float32 on cpu cannot be permuted: routed were 6 tokens"):
        permute(torch.zeros(5, 3), routing)
    with pytest.raises(ValueError, match=r"rows \[11, 3\]"):
        unpermute(torch.zeros(11, 3), routing)
    with pytest.raises(ValueError, match=r"weights \[6\]"):
        unpermute(torch.zeros(12, 3), routing, torch.zeros(6))
