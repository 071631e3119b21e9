"""The expected order of gradients, and the cores for training and for the host's optimizer."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from partool.layout.parameters import parameters
from partool.plan.layout import OffloadLayout
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.spec import load_text
from partool.spec.training import OptimizerSpec
from partool_kernels.host import Pool
from partool_runtime import host
from partool_runtime.data.batches import MicroBatch
from partool_runtime.host import open_pool, split_cores
from partool_runtime.mesh import Ranks, close_ranks, open_ranks
from partool_runtime.offload import HostMemory
from partool_runtime.offload.install import expected
from partool_runtime.offload.optimizer import HostOptimizer, HostSetting
from partool_runtime.offload.resident import tail
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.preparation import prepare
from partool_runtime.weights import fill

sys.path.insert(0, str(Path(__file__).parents[3] / "parity"))
from _plans import small_plan

MACHINE = list(range(16))
WIDE = 2**18
"""Elements of a parameter that needs four buckets."""


@pytest.mark.parametrize(
    ("allowed", "per_node", "rank", "threads", "training", "optimizer"),
    [
        (MACHINE, 1, 0, 10, list(range(6)), list(range(6, 16))),
        (MACHINE, 2, 1, 6, [8, 9], list(range(10, 16))),
        (MACHINE[:8], 4, 1, 3, [4], [5, 6, 7]),  # bound to one of two memory nodes, with one other rank
        (MACHINE[8:], 4, 3, 3, [12], [13, 14, 15]),
        (MACHINE, 3, 2, 1, [10, 11, 12, 13], [14]),
        (MACHINE, 16, 3, 1, [], []),
        (MACHINE, 2, 0, 8, [0, 1], [2, 3, 4, 5, 6, 7]),  # a plan for a larger machine
        (MACHINE, 1, 0, 110, [0, 1], list(range(2, 16))),
        (MACHINE, 8, 1, 110, [2], [3]),
    ],
)
def test_cores_are_shared_out(
    allowed: list[int], per_node: int, rank: int, threads: int, training: list[int], optimizer: list[int]
) -> None:
    assert split_cores(allowed, per_node, rank, threads, machine=16) == (training, optimizer)


@pytest.mark.parametrize("per_node", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("threads", [1, 2, 3, 110])
def test_no_core_is_given_twice(per_node: int, threads: int) -> None:
    given = [
        core for rank in range(per_node) for part in split_cores(MACHINE, per_node, rank, threads, 16) for core in part
    ]
    assert len(given) == len(set(given))


@pytest.mark.parametrize(
    ("own", "starter", "device", "threads", "optimizer", "training", "note"),
    [
        (range(16), range(16), "cuda", 14, range(2, 16), {0, 1}, ""),
        (
            range(16),
            range(16),
            "cuda",
            110,
            range(2, 16),
            {0, 1},
            "the plan has 110 .* this rank has 16 of its own: .* 14",
        ),
        (range(8), range(16), "cuda", 7, range(1, 8), {0}, ""),  # one of two ranks, bound to memory nodes
        (range(1), range(1), "cuda", 3, (), None, "this rank has none to itself: threads that update: 1"),
        (range(4), range(4), "cpu", 4, (), None, ""),
        (range(4), range(4), "cpu", 9, (), None, "9 cores for the update, and this rank has 4 of its own: .* 4"),
    ],
)
def test_threads_are_as_many_as_the_rank_has_cores_for(
    monkeypatch: pytest.MonkeyPatch,
    own: Sequence[int],
    starter: Sequence[int],
    device: str,
    threads: int,
    optimizer: Sequence[int],
    training: set[int] | None,
    note: str,
) -> None:
    left: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(starter if process else own))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: left.append(set(cores)))
    monkeypatch.setattr(host, "Pool", lambda threads, own=(): SimpleNamespace(threads=threads, cores=tuple(own)))
    pool, notes = open_pool(threads, 2 if len(starter) > len(own) else 1, torch.device(device))
    assert pool.cores == tuple(optimizer)
    assert pool.threads == (len(optimizer) or min(threads, len(own)))
    assert left == ([] if training is None else [training])
    assert len(notes) == bool(note)
    assert re.search(note, "".join(notes))


@pytest.fixture
def ranks() -> Iterator[partial[Ranks]]:
    yield partial(open_ranks)
    close_ranks()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_come_in_the_order_that_is_expected(ranks: partial[Ranks], tied: bool, tmp_path: Path) -> None:
    plan = small_plan(tmp_path, ranks=1, zero=3, accumulation=1, model={"tied_embeddings": tied})
    prepared = prepare(plan, ranks(plan), lambda done, sent: None)
    model, came = prepared.model, []
    fill(model, plan.weights, seed=1)
    trained = trained_parameters(model)
    for name, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    tokens = torch.arange(32).view(2, 16)
    prepared.passes.step([MicroBatch(tokens, tokens)], torch.ones(()), lambda term: nullcontext())
    assert came == expected(model, trained, ())  # type: ignore[arg-type]
    late = {came[0], came[-1]}
    assert expected(model, trained, late) == [n for n in came if n not in late] + [n for n in trained if n in late]  # type: ignore[arg-type]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("on_disk", "undo_bytes", "resident", "held_bytes"),
    [
        (False, 0, 0.0, 24 * WIDE),
        (False, 2**20, 0.0, 24 * WIDE + 2**20),
        (True, 0, 0.0, 9 * WIDE),
        (True, 0, 0.5, 12 * WIDE + 9 * WIDE),
    ],
)
def test_state_in_files_is_not_counted_as_memory(
    on_disk: bool, undo_bytes: int, resident: float, held_bytes: int, tmp_path: Path
) -> None:
    """A state on disks counts as three buckets of memory; one in host memory counts whole, with its undo copies."""
    work = OffloadLayout(
        optimizer="nvme" if on_disk else "cpu", gpu_fraction=resident, threads=1, bucket_mib=2**-3, buffers=3,
        dir=str(tmp_path), undo_gib=undo_bytes / 2**30, speculate="undo" if undo_bytes else True,
    )  # fmt: skip
    setting = HostSetting(
        work,
        torch.device("cpu"),
        torch.float32,
        torch.bfloat16,
        accumulates=False,
        memory=HostMemory(pinned=False),
        pool=Pool(1),
    )
    parameters = {name: nn.Parameter(torch.zeros(WIDE, dtype=torch.bfloat16)) for name in "ab"}
    optimizer = HostOptimizer(parameters, OptimizerSpec(), (), setting)
    try:
        assert optimizer.state_bytes() == held_bytes
    finally:
        optimizer.close()


BOTH = """\
model: {layers: 6, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 1}
data: python-stdlib
training: {sequence_length: 64, global_batch: 8, steps: 2, precision: bf16}
"""


def on_both_sides(share: float, *fields: str) -> Plan:
    offload = ["parallel.offload.optimizer=cpu", f"parallel.offload.gpu_fraction={share:.6f}"]
    loaded = load_text(BOTH, overrides=[*offload, *fields])
    assert loaded.spec is not None, loaded.diagnostics
    plan = make_plan(loaded.spec, base_dir=Path("/base"), default_name="both").plan
    assert plan is not None
    return plan


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("micro_batch", "fields"),
    [
        (8, ()),
        (8, ("parallel.offload.moments=bf16",)),
        (8, ("optimizer.name=lion", "parallel.offload.gradients=fp32")),
        (2, ("parallel.offload.speculate=false", "parallel.offload.moments=bf16")),
    ],
)
def test_what_stays_on_the_device_is_what_was_planned(micro_batch: int, fields: tuple[str, ...]) -> None:
    """Weights in the compute type, masters and moments as on the host, and gradients until the step is settled."""
    fields = (*fields, f"parallel.micro_batch={micro_batch}")
    model = on_both_sides(0.4, *fields).model
    tensors = {one.name: nn.Parameter(torch.zeros(one.shape, dtype=torch.bfloat16)) for one in parameters(model)}
    sizes = [(name, tensor.numel()) for name, tensor in tensors.items()]
    staying = tail(sizes, 0.4)
    share = sum(size for name, size in sizes if name in staying) / sum(size for _, size in sizes)
    plan = on_both_sides(share, *fields)
    setting = HostSetting(
        plan.layout.offload,
        torch.device("cpu"),
        torch.float32,
        torch.bfloat16,
        accumulates=micro_batch < 8,
        memory=HostMemory(pinned=False),
        pool=Pool(1),
    )
    optimizer = HostOptimizer(tensors, plan.optimizer, (), setting)
    try:
        optimizer.begin(1e-3, 1.0)
        optimizer.micro_batch(last=micro_batch == 8)
        for name, tensor in tensors.items():
            optimizer.arrive(name, torch.zeros_like(tensor, dtype=setting.wire))
        counted = {
            "parameters": sum(tensor.nbytes for tensor in tensors.values()),
            "optimizer": optimizer.state_bytes(),
            "gradients": optimizer.gradient_bytes(),
        }
        predicted = plan.prediction.memory.terms_bytes
        assert {term: predicted[term] for term in counted} == pytest.approx(counted, rel=0.01)
        host = plan.prediction.memory.host_terms_bytes
        kept = optimizer.held_bytes()
        assert {term: host.get(term, 0) for term in ("masters", "moments", "totals")} == pytest.approx(
            {term: kept.get(term, 0) for term in ("masters", "moments", "totals")}, rel=0.01
        )
        optimizer.skip()
        assert optimizer.gradient_bytes() == 0
    finally:
        optimizer.close()
