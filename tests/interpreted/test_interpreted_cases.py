"""Every kernel in Triton's interpreter at small odd sizes, with configurations of its rule and its grid.

bfloat16 is tested on GPUs only: the interpreter rounds it wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from partool_kernels.cases import Case, case, errors
from partool_kernels.registry import KERNELS, Config, Request
from partool_kernels.registry.feasible import obstacle
from partool_kernels.small import small


def requests(kernel: str) -> list[Request]:
    examples = list(KERNELS[kernel].examples("sm_90"))
    return list(dict.fromkeys(small(each, dtype) for dtype in ("float32", "float16") for each in examples))


def configs(request: Request) -> Iterator[Config]:
    """Yield the rule's configuration, and the first and last other runnable configurations of the grid."""
    kernel = KERNELS[request.kernel]
    rule = kernel.default(request)
    grid = [each for each in kernel.configs(request) if each.blocks != rule.blocks and obstacle(request, each) is None]
    yield from dict.fromkeys((rule, *grid[:1], *grid[-1:]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_are_as_exact_as_those_of_torch(kernel: str) -> None:
    for request in requests(kernel):
        for config in configs(request):
            assert obstacle(request, config) is None
            # Each configuration gets its own case: some kernels update their inputs in place.
            assert max(errors(case(request, torch.device("cpu")), config)) <= 1, (request, config)


def test_a_wrong_result_is_seen() -> None:
    """One element off by one unit, and one bit off where bits have to be equal."""
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
