"""The whole trainer with its optimizer in host memory: bit for bit the steps of the same run without offload."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _plans import small_plan, write_text
from _ranks import Pools
from _tensor_plans import LATENT
from layouts import laid
from often import chosen, often

from partool.layout.tensor import own_partition
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool_kernels import isa
from partool_runtime.checkpoint import step_folder

LAYERS, STEPS, STOP = 3, 4, 2
MODEL = {"layers": LAYERS, "hidden": 90, "head_dim": 18, "ffn_hidden": 111}
"""Odd sizes, and several buckets on each rank."""
EXPERTS = LATENT | {
    "moe": {
        "experts": 4, "top_k": 2, "ffn_hidden": 31, "shared_experts": 1, "first_dense_layers": 1, "aux_loss": 0.02,
        "bias_rate": 0.01,
    }
}  # fmt: skip
"""Two layers of experts, whose ranks share no other parameters, and latent attention."""
HALVES = ((0, 1), (1, LAYERS))
GROUPS = {"*norm*": {"lr_factor": 2.0}, "layers.1.*": {"weight_decay": 0.3, "betas": [0.8, 0.9]}}
FROZEN = ("layers.0.*", "embed.weight")
NEVER, SOMETIMES, ALWAYS = 0.0, 4.2, 1e-3
"""Norms that gradients are clipped to: none, one that some steps exceed, one that all do."""
pytestmark = pytest.mark.skipif(isa() is None, reason="there is no compiled library, whose bits both sides share")


def plain(
    text: Path,
    *,
    ranks: int = 2,
    mesh: Mesh | None = None,
    clip: float = SOMETIMES,
    optimizer: dict[str, Any] | None = None,
    frozen: tuple[str, ...] = (),
    layout: dict[str, Any] | None = None,
    **settings: Any,
) -> Plan:
    """Return a plan without offload; ``optimizer`` and ``layout`` are fields of theirs."""
    model = MODEL | settings.pop("model", {})
    mesh = mesh or Mesh(dp_shard=ranks)
    settings = {"zero": 1, "precision": "bf16", "steps": STEPS} | settings
    plan = small_plan(text, ranks=mesh.dp, model=model, **settings)
    fields = {"mesh": mesh, "recompute": ("none",) * LAYERS, "stages": ((0, LAYERS),)} | (layout or {})
    spec = plan.optimizer.model_dump() | {"clip": clip} | (optimizer or {})
    return plan.model_copy(
        update={
            "layout": laid(plan.layout, **fields),
            "devices": plan.devices.model_copy(update={"per_node": mesh.world_size}),
            "optimizer": type(plan.optimizer).model_validate(spec),
            "kernels": plan.kernels.model_copy(update={"mode": "native"}),
            "frozen": frozen,
            "partition": own_partition(plan.model, mesh.tp, 1, False) if mesh.tp > 1 else plan.partition,
        }
    )


def offloaded(
    plan: Plan,
    speculate: bool | str = True,
    *,
    gpu_fraction: float = 0.0,
    folder: str = "",
    parameters: str = "none",
    **host: Any,
) -> Plan:
    """Return the plan with its optimizer in host memory, or on disks in ``folder``."""
    alone = plan.layout.mesh.world_size == 1
    work = {"gradients": "bf16" if alone else "fp32", "bucket_mib": 2**-3, "undo_gib": 2**-10}
    fields = {
        "offload_optimizer": "nvme" if folder else "cpu",
        "gpu_fraction": gpu_fraction,
        "offload_parameters": parameters,
        **(work | {"speculate": speculate, "dir": folder or None} | host),
    }
    return plan.model_copy(update={"layout": laid(plan.layout, **fields)})


Cases = dict[str, tuple[Plan, list[Plan]]]
"""A plan without offload, and what must end with its bits."""


def two_ranks(make: Callable[..., Plan], disk: str) -> Cases:
    """Return cases that together use everything once."""
    zero_0 = make(zero=0, mesh=Mesh(dp_replicate=2))
    zero_2 = make(zero=2, clip=ALWAYS)
    apart = make(
        zero=3,
        accumulation=1,
        precision="fp32",
        frozen=FROZEN,
        clip=NEVER,
        layout={"gather": "sequential", "prefetch": 2, "persistent": 100, "leaves": ("layers.*.ffn",)},
    )
    tied = make(zero=3, precision="fp16", model={"tied_embeddings": True}, optimizer={"groups": GROUPS})
    lion = make(zero=2, optimizer={"name": "lion", "betas": [0.9, 0.99], "lr": 1e-3})
    files = make(zero=1, accumulation=1, precision="fp64")
    tensor = make(mesh=Mesh(tp=2))
    piped = make(mesh=Mesh(pp=2), accumulation=3, layout={"stages": HALVES})
    experts = make(zero=2, model=EXPERTS, layout={"expert": 2})
    return {
        "zero-0": (zero_0, [offloaded(zero_0)]),
        "zero-2": (zero_2, [offloaded(zero_2, how) for how in (False, True)]),
        "zero-3 apart": (apart, [offloaded(apart, parameters="nvme", folder=disk)]),
        "zero-3 optimizer": (apart, [offloaded(apart)]),
        "tied groups": (tied, [offloaded(tied, parameters="cpu")]),
        "tied undone": (tied, [offloaded(tied, "undo")]),
        "lion": (lion, [offloaded(lion, gpu_fraction=0.4)]),
        "files": (files, [offloaded(files, how, folder=disk, buffers=3) for how in (True, "undo")]),
        "tensor": (tensor, [offloaded(tensor)]),
        "pipeline": (piped, [offloaded(piped)]),
        "experts": (experts, [offloaded(experts)]),
    }


def add(jobs: Jobs, cases: Cases) -> None:
    for name, (reference, others) in cases.items():
        jobs.train(f"{name} plain", reference, run=f"{name} plain")
        for index, plan in enumerate(others):
            jobs.train(f"{name} {index}", plan, run=f"{name} {index}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    write_text(folder / "text")
    return folder


NAMES = tuple(two_ranks(partial(plain, Path("text")), ""))
OFTEN = ("zero-0", "zero-2", "zero-3 apart", "tied groups", "experts")
"""Cases of two ranks that run each time."""
LOOKED_AT = ("zero-0", "zero-2", "zero-3 apart", "tied groups")
"""Cases that tests without parameters look at."""


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, pools: Pools, folder: Path) -> tuple[Jobs, Cases]:
    """Run the cases of two ranks, and runs that end early, one with steps pending, and go on otherwise."""
    jobs, make, disk = Jobs(folder, pools), partial(plain, folder / "text"), folder / "disk"
    disk.mkdir()
    every = two_ranks(make, str(disk))
    cases = {name: every[name] for name in LOOKED_AT} | chosen(request, every)
    add(jobs, cases)
    bare = cases["zero-2"][0]
    jobs.train("out stopped", offloaded(bare), run="out", stop_at=STOP)
    jobs.train("out resumed", bare, run="out", resume=True)
    shutil.copytree(folder / "zero-2 plain", folder / "in")
    shutil.rmtree(step_folder(folder / "in" / "checkpoints", STEPS))
    jobs.train("in resumed", offloaded(bare, "undo", folder=str(disk)), run="in", resume=True)
    return jobs, cases


def state(jobs: Jobs, name: str, step: int = STEPS) -> dict[str, torch.Tensor]:
    return jobs.state(name, step)


def steps(jobs: Jobs, name: str) -> list[tuple[float, ...]]:
    return [(e["loss"], e["grad_norm"], e["skipped"]) for e in jobs.events(name, "step")]


def assert_same_bits(jobs: Jobs, name: str, reference: str, ranks: int = 2) -> None:
    assert [jobs.ended(job, rank) for job in (name, reference) for rank in range(ranks)] == ["done"] * 2 * ranks
    assert repr(steps(jobs, name)) == repr(steps(jobs, reference))  # a norm may be NaN
    assert jobs.events(name, "validation") == jobs.events(reference, "validation")
    assert_same_state(state(jobs, name), state(jobs, reference))
    for rank in range(ranks):
        (counted,) = jobs.events(name, "offload", rank)
        assert counted["bytes_down"] > 0
        assert counted["late_buffers"] == 0


def assert_same_state(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(got[name], tensor)] == []
    assert all(got[name].dtype == tensor.dtype for name, tensor in wanted.items())


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", often(NAMES, OFTEN))
def test_steps_are_those_without_offload(pair: tuple[Jobs, Cases], name: str) -> None:
    jobs, cases = pair
    for index in range(len(cases[name][1])):
        assert_same_bits(jobs, f"{name} {index}", f"{name} plain")


@pytest.mark.timeout(170)
def test_parameters_on_the_host(pair: tuple[Jobs, Cases]) -> None:
    jobs, cases = pair
    on_host = [
        (f"{name} {index}", f"{name} plain")
        for name, (_, others) in cases.items()
        for index, plan in enumerate(others)
        if plan.layout.offload.parameters != "none"
    ]
    assert len(on_host) == 2  # one of them in files
    for name, reference in on_host:
        assert_same_bits(jobs, name, reference)


@pytest.mark.timeout(170)
def test_gradients_are_clipped_where_they_should_be(pair: tuple[Jobs, Cases]) -> None:
    jobs, _ = pair
    norms = [norm for _, norm, _ in steps(jobs, "zero-0 plain")]
    assert min(norms) < SOMETIMES < max(norms)
    assert min(norm for _, norm, _ in steps(jobs, "zero-2 plain")) > ALWAYS


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", ["out", "in"])
def test_a_run_goes_on_with_and_without_offload(pair: tuple[Jobs, Cases], name: str) -> None:
    jobs, _ = pair
    if name == "out":
        assert "Preempted" in jobs.ended("out stopped")
    assert jobs.ended(f"{name} resumed") == "done"
    assert jobs.events(name, "start")[1]["resumed_from"] == STOP
    assert_same_state(state(jobs, name), state(jobs, "zero-2 plain"))


@pytest.mark.timeout(170)
def test_comparison_can_fail(pair: tuple[Jobs, Cases]) -> None:
    jobs, _ = pair
    with pytest.raises(AssertionError):
        assert_same_state(state(jobs, "zero-2 0", step=STOP), state(jobs, "zero-2 plain"))


def one_rank(make: Callable[..., Plan]) -> Cases:
    """Return cases of a rank that is alone."""
    bare, half = make(zero=0, accumulation=3), make(zero=0, accumulation=1, precision="fp16", clip=ALWAYS)
    return {
        "alone bf16": (bare, [offloaded(bare), offloaded(bare, gradients="fp32", gpu_fraction=0.3)]),
        "alone fp16": (half, [offloaded(half)]),
    }


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, pools: Pools, folder: Path) -> tuple[Jobs, Cases]:
    """Run the cases of one rank."""
    jobs = Jobs(folder, pools)
    cases = chosen(request, one_rank(partial(plain, folder / "text", ranks=1)))
    add(jobs, cases)
    return jobs, cases


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", often(["alone bf16", "alone fp16"], ["alone bf16"]))
def test_one_rank_sends_gradients_as_they_are_made(alone: tuple[Jobs, Cases], name: str) -> None:
    jobs, cases = alone
    for index in range(len(cases[name][1])):
        assert_same_bits(jobs, f"{name} {index}", f"{name} plain", ranks=1)


@pytest.mark.timeout(170)
def test_three_ranks_with_uneven_shards(folder: Path, alone: tuple[Jobs, Cases]) -> None:
    jobs, _ = alone
    jobs.train("one", plain(folder / "text", ranks=1, zero=2, precision="fp64"), run="one")
    bare = plain(folder / "text", ranks=3, zero=2, precision="fp64")
    add(jobs, {"three": (bare, [offloaded(bare)])})
    assert_same_bits(jobs, "three 0", "three plain", ranks=3)
    one, spread = state(jobs, "one"), state(jobs, "three 0")
    assert one.keys() == spread.keys()
    for name, tensor in one.items():
        assert float((spread[name] - tensor).abs().max()) <= 1e-12 * max(1.0, float(tensor.abs().max())), name


@pytest.mark.timeout(170)
def test_replicas_of_shards(pools: Pools, folder: Path) -> None:
    jobs = Jobs(folder, pools)
    bare = plain(folder / "text", mesh=Mesh(dp_replicate=2, dp_shard=2), zero=2, accumulation=3)
    add(jobs, {"replicas": (bare, [offloaded(bare)])})
    assert_same_bits(jobs, "replicas 0", "replicas plain", ranks=4)
