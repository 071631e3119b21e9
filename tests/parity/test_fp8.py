"""Training with products in 8 bits (emulated on CPUs): near bf16 in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools, in_group
from _tensor_plans import tensor_plan
from often import chosen
from torch import nn

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool_runtime.fp8 import Fp8Linear
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.parallel.tensor.rows import row

HALVES = ((0, 1), (1, 4))
MODEL: dict[str, Any] = {
    "hidden": 48, "ffn_hidden": 96, "heads": 3, "kv_heads": 3, "head_dim": 16, "vocab": 257, "qkv_bias": True
}  # fmt: skip
ODD = MODEL | {"head_dim": 8}
"""One of two tensor ranks holds 16 query outputs, the other 8, which stay in bf16."""


def make(text: Path, mesh: Mesh, precision: str = "fp8", *, zero: int = 1, **fields: Any) -> Plan:
    """Return a plan of two ranks that learns slowly: what differs in the last digits stays near."""
    settings = {"zero": zero, "precision": precision}
    plan = tensor_plan(text, mesh, settings=settings, **{"model": MODEL, **fields})
    return plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update={"lr": 2e-3})})


SHARDS, PIPED = Mesh(dp_shard=2), {"mesh": Mesh(pp=2), "stages": HALVES}
WIDE: dict[str, dict[str, Any]] = {
    "bf16": {"mesh": SHARDS, "precision": "bf16"},
    "odd bf16": {"mesh": SHARDS, "precision": "bf16", "model": ODD},
}
CORE: dict[str, dict[str, Any]] = {
    "zero 3 selective": {"mesh": SHARDS, "zero": 3, "recompute": "selective"},
    "odd tensor shares": {
        "mesh": Mesh(tp=2), "model": ODD, "sequence_norms": True, "tensor_overlap": "backward", "tensor_chunks": 2
    },
    "zb-h1": {**PIPED, "schedule": "zb-h1"},
}  # fmt: skip
FURTHER: dict[str, dict[str, Any]] = {
    "zero 1": {"mesh": SHARDS},
    "leaves full": {"mesh": Mesh(dp_replicate=2), "zero": 0, "leaves": ("layers.*.ffn",), "recompute": "full"},
    "compiled": {"mesh": SHARDS, "compile": "block"},
    "tensor selective": {"mesh": Mesh(tp=2), "recompute": "selective"},
    "tensor compiled": {"mesh": Mesh(tp=2), "compile": "block"},
    "1f1b": {**PIPED, "schedule": "1f1b"},
    "tensor pieces full": {"mesh": Mesh(tp=2), "tensor_chunks": 2, "recompute": "full"},
    **{
        f"sequence {method}": {"mesh": Mesh(cp=2), "sequence_method": method}
        for method in ("ulysses", "ring", "all_gather")
    },
}


def launch(pools: Pools, folder: Path, cases: dict[str, dict[str, Any]]) -> Jobs:
    """Train all cases one after the other in two processes, and those in bf16 that they must stay near."""
    write_text(folder / "text")
    jobs = Jobs(folder, pools)
    wide = {wide_of(name) for name in cases}
    for name, case in ({name: WIDE[name] for name in wide} | cases).items():
        jobs.train(name, make(folder / "text", **case), run=name)
    return jobs


def losses(jobs: Jobs, name: str) -> list[float]:
    assert [jobs.ended(name, rank) for rank in range(2)] == ["done"] * 2, name
    return [event["loss"] for event in jobs.events(name, "step")]


def wide_of(name: str) -> str:
    """Return the case in bf16 with the model of a case."""
    return "odd bf16" if "odd" in name else "bf16"


def assert_near(jobs: Jobs, name: str) -> None:
    wide, narrow = losses(jobs, wide_of(name)), losses(jobs, name)
    assert narrow == pytest.approx(wide, abs=1e-2), name
    assert narrow != wide


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    compared = {name: CORE[name] for name in ("zb-h1", "zero 3 selective")}
    return launch(pools, tmp_path_factory.mktemp("runs"), compared | chosen(request, CORE))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(CORE))
def test_losses_are_near_those_of_bf16(ran: Jobs, name: str) -> None:
    assert_near(ran, name)


@pytest.mark.timeout(300)
def test_layouts_that_cut_no_matrix_compute_the_same(ran: Jobs) -> None:
    # Gradients of micro-batches are added in other orders, and in other types.
    assert losses(ran, "zb-h1") == pytest.approx(losses(ran, "zero 3 selective"), abs=1e-3)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_layout_is_near_bf16(pools: Pools, tmp_path: Path) -> None:
    jobs = launch(pools, tmp_path, FURTHER)
    for name in FURTHER:
        assert_near(jobs, name)


def row_adds_its_bias_once() -> None:
    """Compare a product in 8 bits, cut by inputs over the ranks, with that of the whole matrix in bf16."""
    with in_group():
        _row_adds_its_bias_once(dist.get_rank())


def _row_adds_its_bias_once(rank: int) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(64, 48).bfloat16()
    x_BSI, mine = torch.randn(2, 5, 64).bfloat16(), nn.Linear(32, 48).bfloat16()
    columns = slice(32 * rank, 32 * rank + 32)
    with torch.no_grad():
        whole.bias.fill_(3.0)
        mine.weight.copy_(whole.weight[:, columns])
        mine.bias.copy_(whole.bias)
        narrow: Any = mine
        narrow.__class__, narrow.fits, narrow.narrow, narrow.mode = Fp8Linear, True, torch.float8_e4m3fn, "torch"
        group = dist.group.WORLD
        assert group is not None
        out_BSH = row(x_BSI[..., columns].contiguous(), mine, Team(group.group_name, rank, 2))
        assert float((out_BSH - whole(x_BSI)).abs().max()) < 0.2


@pytest.mark.timeout(150)
def test_ranks_that_share_inputs_add_the_bias_once(pools: Pools) -> None:
    pools.run(2, row_adds_its_bias_once)
