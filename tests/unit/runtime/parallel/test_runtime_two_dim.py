"""The order in which products of two-dimensional tensor parallelism start exchanges, compute and wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from partool_runtime.deferral import collecting
from partool_runtime.parallel.tensor.two_dim_comm import Grid
from partool_runtime.parallel.tensor.two_dim_ops import first_products, second_product
from partool_runtime.torch_internals.tensors import TorchDispatchMode

TOKENS, WIDTH, OUT = (2, 3), 4, 6


class Products(TorchDispatchMode):
    """Dispatch mode that records every matrix product."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._events.append("product")
        return func(*args, **(kwargs or {}))


class Alone:
    """An axis on which two ranks hold the same data; records the exchanges that are started and waited for."""

    size, place = 2, 0

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def _pending(self, result: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._events.append(f"start {self._name}")

        def wait() -> torch.Tensor:
            self._events.append(f"wait {self._name}")
            return result

        return wait

    def start_sum(self, x: torch.Tensor, *, in_place: bool = False) -> Callable[[], torch.Tensor]:
        del in_place
        return self._pending(2 * x)

    def start_scatter(self, x_Rx: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._pending(2 * x_Rx[0])

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._pending(torch.stack([x, x]))


def run(*, second: bool, chunks: int, overlap: bool, put_off: bool = False) -> tuple[list[str], list[str]]:
    """Return the events of a forward and a backward pass in order; heads are distributed in the second product only."""
    events: list[str] = []
    axes = cast(Any, Alone("outer", events)), cast(Any, Alone("inner", events))
    grid = Grid(*axes, chunks=chunks, overlap=overlap)
    x_BSH = torch.randn(*TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(OUT, 2 * WIDTH if second else WIDTH, requires_grad=True)
    with Products(events):
        if second:
            out = second_product(grid, x_BSH, weight, dealt=True)
        else:
            (out,) = first_products(grid, x_BSH, [weight], deal=False)
        forward = list(events)
        events.clear()
        later: list[Callable[[], None]] = []
        if put_off:
            with collecting(later):
                out.sum().backward()
            events.append("later")
            assert weight.grad is None
            for work in later:
                work()
        else:
            out.sum().backward()
    assert weight.grad is not None
    assert x_BSH.grad is not None
    return forward, events


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_sum_of_a_piece_travels_while_the_next_is_multiplied(chunks: int) -> None:
    forward, _ = run(second=False, chunks=chunks, overlap=False)
    assert forward == ["product", "start inner"] * chunks + ["wait inner"] * chunks


def test_pieces_of_heads_are_multiplied_as_they_arrive() -> None:
    forward, _ = run(second=True, chunks=2, overlap=False)
    piece = ["wait inner", "product", "start outer"]
    assert forward == ["start inner"] * 2 + piece * 2 + ["wait outer"] * 2


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_of_weights_are_computed_while_that_of_the_input_travels(second: bool, chunks: int) -> None:
    axis = "inner" if second else "outer"
    sent, waited = ["product", f"start {axis}"] * chunks, [f"wait {axis}"] * chunks
    assert run(second=second, chunks=chunks, overlap=False)[1][-2 * chunks - 1 - chunks :] == [
        *sent,
        *waited,
        "product",
    ]
    assert run(second=second, chunks=chunks, overlap=True)[1][-2 * chunks - 1 - chunks :] == [*sent, "product", *waited]


def test_gradients_of_weights_can_be_put_off() -> None:
    _, backward = run(second=False, chunks=1, overlap=True, put_off=True)
    assert backward == ["product", "start outer", "wait outer", "later", "product"]


def test_more_pieces_than_tokens_are_as_many_as_tokens() -> None:
    forward, _ = run(second=False, chunks=100, overlap=False)
    assert forward.count("product") == TOKENS[0] * TOKENS[1]
