"""Operators called without the dispatcher: the same bits and memory as through it, and only where that is allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from partool_kernels import direct
from partool_kernels.glu.op import glu
from partool_kernels.norm.op import Norm, add_norm, norm
from partool_kernels.rope.op import rope

Inputs = tuple[torch.Tensor, ...]


def _glu(x: torch.Tensor, y: torch.Tensor) -> Inputs:
    return (glu(x, y, "gelu_tanh"),)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> Inputs:
    return (norm(x, Norm("rms", 1e-6, weight)),)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Inputs:
    return (norm(x, Norm("layer", 1e-6, weight, bias)),)


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Inputs:
    return add_norm(x, residual, Norm("rms", 1e-6, weight))


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Inputs:
    return (rope(x, (cos, sin)),)


def _rope_norm(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Inputs:
    return (rope(x, (cos, sin), weight, 1e-6),)


HEADS, TABLE = (2, 3, 5, 6), (3, 6)
CASES: dict[str, tuple[Callable[..., Inputs], tuple[tuple[int, ...], ...], int]] = {
    "glu": (_glu, ((3, 7), (3, 7)), 2),
    "norm": (_norm, ((3, 7), (7,)), 2),
    "layer_norm": (_layer_norm, ((3, 7), (7,), (7,)), 3),
    "add_norm": (_add_norm, ((3, 7), (3, 7), (7,)), 3),
    "rope": (_rope, (HEADS, TABLE, TABLE), 1),
    "rope_norm": (_rope_norm, (HEADS, (6,), TABLE, TABLE), 2),
}
"""Name → function, shapes of its inputs, and how many of the first inputs have gradients."""
OPERATORS = {"layer_norm": "norm"}
every_case = pytest.mark.parametrize("case", CASES)


def inputs_of(case: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    _, sizes, wanted = CASES[case]
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    if case.startswith("rope"):
        angle = made[-1][:, :3].repeat(1, 2).to(torch.promote_types(dtype, torch.float32))
        made[-2:] = [angle.cos(), angle.sin()]
    return [x.requires_grad_(n < wanted) for n, x in enumerate(made)]


def passes(case: str, dtype: torch.dtype) -> tuple[Inputs, Inputs, list[torch.Tensor]]:
    """Return results, gradients and the tensors saved for the backward pass."""
    function, _, wanted = CASES[case]
    inputs, saved = inputs_of(case, dtype), []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x.detach())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = function(*inputs)
    if case == "add_norm":
        # Gradient of the sum alone, with none for the norm's result.
        (alone,) = torch.autograd.grad(results[0].square().sum(), inputs[0], retain_graph=True)
        saved.append(alone)
    gradients = torch.autograd.grad(sum(x.square().sum() for x in results), inputs[:wanted])
    return tuple(x.detach() for x in results), gradients, saved


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Send every call through the dispatcher."""
    return lambda: monkeypatch.setattr(direct, "plain", lambda *_: False)


def operators(run: Callable[[], object]) -> Counter[str]:
    """Return how often each of partool's operators was called through the dispatcher."""
    seen: Counter[str] = Counter()

    class See(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator.namespace == "partool":
                seen[operator.name()] += 1
            return operator(*args, **(kwargs or {}))

    with See():
        run()
    return seen


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_and_what_is_kept_are_the_same(case: str, dtype: torch.dtype, dispatched: Callable[[], None]) -> None:
    ours: list[Any] = []
    assert operators(lambda: ours.append(passes(case, dtype))) == {}  # not dispatched
    dispatched()
    assert len(operators(lambda: ours.append(passes(case, dtype)))) == (1 if case == "rope" else 2)
    for one, other in zip(*ours, strict=True):
        assert len(one) == len(other) > 0
        for x, y in zip(one, other, strict=True):
            assert x.dtype == y.dtype
            assert x.stride() == y.stride()
            assert torch.equal(x, y)


@every_case
def test_results_may_be_changed_in_place_and_are_new(case: str) -> None:
    """Results behave like an operator's, with and without gradients."""
    function, inputs = CASES[case][0], inputs_of(case)
    for given in (inputs, [x.detach() for x in inputs]):
        before = [x.detach().clone() for x in given]
        for result in function(*given):
            assert result.requires_grad == given[0].requires_grad
            result.mul_(2.0)
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


@every_case
def test_no_node_of_autograd_where_no_gradients_are_wanted(case: str) -> None:
    function, inputs = CASES[case][0], inputs_of(case)
    with torch.no_grad():
        assert all(x.grad_fn is None for x in function(*inputs))
    assert all(x.grad_fn is not None for x in function(*inputs))


@every_case
def test_second_derivatives_are_right_or_refused(case: str) -> None:
    """A rotation's derivative is a rotation; the other operators have no second derivatives."""
    function, _, wanted = CASES[case]
    inputs = inputs_of(case, torch.float64)
    gradients = torch.autograd.grad(
        sum(x.square().sum() for x in function(*inputs)), inputs[:wanted], create_graph=True
    )
    if case == "rope":
        # A rotation keeps the sum of squares, whose second derivative is 2.
        (second,) = torch.autograd.grad(gradients[0].sum(), inputs[0])
        assert torch.allclose(second, torch.full_like(second, 2.0))
        return
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        gradients[0].sum().backward()


@every_case
def test_compilers_and_traces_see_the_operator(case: str) -> None:
    function, name = CASES[case][0], OPERATORS.get(case, case)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return graph.forward

    torch._dynamo.reset()
    inputs = [x.detach() for x in inputs_of(case)]
    compiled = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(compiled, function(*inputs), strict=True))
    graphs.append(make_fx(function, tracing_mode="fake")(*inputs).graph)
    for graph in graphs:
        assert [n for n in graph.nodes if str(n.target).startswith(f"partool.{name}")], graph
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in inputs]
        assert set(operators(lambda: function(*fake))) == {f"partool::{name}"}


def test_only_plain_tensors_are_plain() -> None:
    x = torch.zeros(2)
    assert direct.plain(x, torch.nn.Parameter(x), None, 1.0, "auto")
    with FakeTensorMode() as mode:
        assert not direct.plain(mode.from_tensor(x))
    assert not direct.plain(x, TwoTensor(x, x))
    seen: list[bool] = []
    torch.func.vmap(lambda row: seen.append(direct.plain(row)) or row)(torch.zeros(2, 3))
    assert seen == [False]
