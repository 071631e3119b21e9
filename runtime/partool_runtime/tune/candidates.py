"""Selection of the configurations of a kernel that are worth running."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from partool_kernels.compiled import Compiled
from partool_kernels.proof import Proof, ProofJob
from partool_kernels.registry import KERNELS, Config, Request
from partool_kernels.registry.feasible import obstacle
from partool_kernels.registry.look_up import Registry

MOST = 64
"""Number of configurations of a large grid that are timed before the search continues near the best of them."""
Prove = Callable[[Iterable[ProofJob], int], Iterator[Proof]]


class Filtered(NamedTuple):
    """Configurations that can run, with their resources, and the reasons why the others cannot."""

    kept: dict[Config, Compiled]
    refused: dict[Config, str]


def grid(request: Request) -> list[Config]:
    """Return the rule's configuration and all other configurations of the kernel's grid."""
    kernel = KERNELS[request.kernel]
    return list(dict.fromkeys([kernel.default(request), *kernel.configs(request)]))


def first(request: Request, registry: Registry, most: int = MOST) -> list[Config]:
    """Return the configurations to time first.

    These are the rule's configuration, the entries of similar requests, and up to ``most`` random others.
    """
    everything = grid(request)
    likely = [everything[0], *(choice.config for choice in registry.choices(request)[:4])]
    others = [config for config in everything if config not in likely]
    if len(others) > most:
        # Seeded by the request, so that a restart draws the same configurations.
        others = random.Random(repr(request)).sample(others, most)
    return list(dict.fromkeys([*likely, *others]))


def beside(config: Config, everything: Sequence[Config]) -> list[Config]:
    """Return the configurations in ``everything`` that differ from ``config`` in one number."""
    numbers = _numbers(config)
    return [other for other in everything if sum(numbers.get(k) != v for k, v in _numbers(other).items()) == 1]


def _numbers(config: Config) -> dict[str, Any]:
    options = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "blocks"}
    return config.constants | options


def runnable(request: Request, configs: Iterable[Config], prove: Prove, processes: int) -> Filtered:
    """Filter configurations without running them: by estimates, then by compiling them.

    A configuration is refused if it spills registers, exceeds the shared memory, does not use matrix units or emulates
    8-bit products where its kernel needs them, or does not compile. The configuration of the kernel's rule may
    spill, since it is used anyway without tuning.
    """
    kept: dict[Config, Compiled] = {}
    refused: dict[Config, str] = {}
    jobs, rule = [], KERNELS[request.kernel].default(request)
    for config in configs:
        hindrance = obstacle(request, config)
        if hindrance is None:
            jobs.append(ProofJob(request, config, None if config == rule else 0))
        else:
            refused[config] = hindrance
    for proof in prove(jobs, processes):
        if proof.compiled is not None and not proof.faults:
            kept[proof.job.config] = proof.compiled
        else:
            refused[proof.job.config] = proof.faults[0]
    return Filtered(kept, refused)
