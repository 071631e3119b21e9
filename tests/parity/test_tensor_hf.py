"""Models that transformers builds train as its own code does: over tensor ranks, with ZeRO and in pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import _hf_memory_worker as memory
import _hf_worker as worker
import pytest
from _ranks import Pools, named
from often import beginning

CHOSEN: tuple[tuple[int, str], ...] = ((2, ""), (3, ""), (4, ""), (4, "pipelines"), (2, "layouts"))
"""World sizes with what is chosen."""
OFTEN = tuple(
    f"2  {name}"
    for name in (
        "llama dp=2", "mixtral tp=2", "deepseek_v2 tp=2", "mistral_single", "gpt_neox tp=2", "gemma_deep tp=2",
        "phi3", "qwen2 tp=2 frozen", "gemma3_text_deep pp=2", "qwen3_deep pp=2 fields=schedule-zb-v", "llama_dropout",
    )
)  # fmt: skip
"""First words of the cases that run each time."""


def found(of: Callable[[int, str], dict[str, Any]]) -> list[Any]:
    """Return parameters (world size, case) of all that is chosen."""
    return [
        pytest.param(world, value, id=f"{world} {chosen} {name}", marks=beginning(f"{world} {chosen} {name}", OFTEN))
        for world, chosen in CHOSEN
        for name, value in of(world, chosen).items()
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "case"), found(lambda world, chosen: named(worker.cases(world, chosen))))
def test_models_equal_those_of_transformers(pools: Pools, world: int, case: worker.Case) -> None:
    pools.run(1, worker.written, case.model)
    pools.run(world, worker.check_case, case, timeout_s=280)


DROPPING = found(
    lambda world, chosen: {name: (name, policies) for name, policies in worker.dropping(world, chosen).items()}
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "dropping"), DROPPING)
def test_dropout_is_the_same_when_recomputed(pools: Pools, world: int, dropping: tuple[str, tuple[str, ...]]) -> None:
    pools.run(1, worker.written, dropping[0])
    pools.run(world, worker.check_dropout_of, *dropping, timeout_s=280)


@pytest.mark.timeout(300)
def test_bf16(pools: Pools) -> None:
    pools.run(1, worker.written, "llama")
    pools.run(2, worker.check_bf16_of, "llama")


@pytest.mark.timeout(200)
def test_loading_takes_a_ranks_part_and_one_tensor(pools: Pools, tmp_path: Path) -> None:
    pools.close(2)  # ranks whose memory nothing else has used
    pools.run(1, memory.write, tmp_path)
    pools.run(2, memory.check, tmp_path, timeout_s=180)
