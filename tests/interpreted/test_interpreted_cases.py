"""Every kernel in Triton's interpreter at small odd sizes, with configurations of its rule and its grid.

The interpreter has no bfloat16 that could be trusted; that is for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from partool_kernels.cases import Case, case, errors
from partool_kernels.registry import KERNELS, Config, Request
from partool_kernels.registry.feasible import obstacle

ROWS = 5
WIDTHS = {"d": 16, "chunk": 64, "senders": 3, "n": 37}
"""Where a width cannot be any number: even, or of whole bytes."""
SMALL: dict[str, dict[str, int]] = {
    "moe_permute": {"k": 2}, "moe_unpermute": {"k": 2}, "moe_unpermute_backward": {"k": 2},
    "rope": {"n": 3}, "rope_norm_forward": {"n": 3}, "rope_norm_backward": {"n": 3},
    "onebit_pack": {"rows": 77}, "onebit_unpack": {"rows": 77},
}  # fmt: skip
"""Of single kernels."""


def small(example: Request, dtype: str) -> Request:
    """Return a typical request with few rows and narrow odd widths, in a type that the interpreter computes with."""
    own = WIDTHS | SMALL.get(example.kernel, {})
    shape = tuple((name, own.get(name, 37)) for name, _ in example.shape)
    dtypes = tuple(dtype if name == "bfloat16" else name for name in example.dtypes)
    return replace(example, shape=shape, rows=own.get("rows", ROWS), dtypes=dtypes)


def requests(kernel: str) -> list[Request]:
    examples = list(KERNELS[kernel].examples("sm_90"))
    return list(dict.fromkeys(small(each, dtype) for dtype in ("float32", "float16") for each in examples))


def configs(request: Request) -> Iterator[Config]:
    """Yield the rule's configuration, and the first and last others of the grid that can run."""
    kernel = KERNELS[request.kernel]
    rule = kernel.default(request)
    grid = [each for each in kernel.configs(request) if each.blocks != rule.blocks and obstacle(request, each) is None]
    yield from dict.fromkeys((rule, *grid[:1], *grid[-1:]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_are_as_exact_as_those_of_torch(kernel: str) -> None:
    for request in requests(kernel):
        made = case(request, torch.device("cpu"))
        for config in configs(request):
            assert obstacle(request, config) is None
            assert max(errors(made, config)) <= 1, (request, config)


def test_a_wrong_result_is_seen() -> None:
    """A unit too far in one element, and a bit where bits have to be equal."""
    (request, *_) = requests("glu_forward")
    made = case(request, torch.device("cpu"))
    config = KERNELS["glu_forward"].default(request)

    def off(by: float) -> Case:
        def run(config: Config) -> list[torch.Tensor]:
            results = [result.clone() for result in made.run(config)]
            results[0].view(-1)[17] += by
            return results

        return made._replace(run=run)

    largest = float(made.exact()[0].abs().max())
    assert errors(off(0.0), config)[0] <= 1
    assert errors(off(1e-5 * largest), config)[0] > 1
    assert errors(off(float("nan")), config) == [float("inf")]
    alike = made._replace(eager=lambda: made.run(config), factors=(0.0,))
    assert errors(alike, config) == [0.0]
    assert errors(off(1e-6)._replace(eager=alike.eager, factors=(0.0,)), config) == [float("inf")]
