"""The record of a device's memory, followed on small tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from partool_runtime.dry import owners, record
from partool_runtime.dry.allocator import CachingAllocator
from partool_runtime.dry.memory import POINTS, MemoryRecord
from partool_runtime.dry.record import CollectiveRecord
from partool_runtime.optim.muon import WholeMatrices, orthogonalised

KIB = 1024


def tensor(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


@pytest.fixture
def memory() -> Iterator[MemoryRecord]:
    """A record that is active, in the phase of activations."""
    found = MemoryRecord("cpu")
    found.phase = "activations"
    with found.watching(), CollectiveRecord(found):
        yield found


def test_storages_count_once_and_until_their_last_view_goes(memory: MemoryRecord) -> None:
    memory.begin()
    whole = tensor(4)
    part = whole[:10].view(2, 5)
    del whole
    beside = tensor(1)
    found = memory.trace(None)
    assert found.peak_bytes == found.leaked_bytes == 5 * KIB
    del part, beside
    assert memory.trace(None).leaked_bytes == 0
    assert memory.trace(None).peak_bytes == 5 * KIB


def test_what_is_held_before_the_step_counts_and_what_a_step_keeps_is_told(memory: MemoryRecord) -> None:
    memory.phase = "parameters"
    state = tensor(8)
    memory.phase = "activations"
    memory.begin()
    kept, other = tensor(2), tensor(1)
    del other
    found = memory.trace(None)
    assert (found.peak_bytes, found.leaked_bytes) == (11 * KIB, 2 * KIB)
    assert found.terms_bytes == {"activations": 2 * KIB, "parameters": 8 * KIB, "working": KIB}
    assert len(state) + len(kept) == 10 * KIB


def test_storages_that_change_their_size(memory: MemoryRecord) -> None:
    gathered = tensor(4)
    memory.begin()
    gathered.untyped_storage().resize_(0)
    small = tensor(1)
    gathered.untyped_storage().resize_(6 * KIB)
    found = memory.trace(None)
    assert (found.peak_bytes, found.leaked_bytes) == (7 * KIB, 3 * KIB)
    assert len(small) == KIB


def test_gradients_belong_to_their_parameters_term(memory: MemoryRecord) -> None:
    weight = torch.zeros(KIB, requires_grad=True)
    memory.begin()
    (weight * 2).sum().backward()
    memory.belongs("gradients", {"weight": weight.grad, "other": None})
    assert memory.trace(None).terms_bytes["gradients"] == 4 * KIB


def test_operators_are_told_with_their_tensors_and_the_timeline_keeps_the_peak(memory: MemoryRecord) -> None:
    memory.begin()
    for kib in range(2 * POINTS):
        held = tensor(1 + (kib == 700) * 99)
    found = memory.trace(None)
    assert len(found.timeline) <= POINTS
    assert max(size_bytes for _, size_bytes in found.timeline) == found.peak_bytes >= 100 * KIB
    assert found.owners[0].operator == "aten::empty"
    assert found.owners[0].size_bytes == found.peak_bytes
    assert len(held) == KIB


def test_tensors_are_named_by_module_and_parameter(memory: MemoryRecord) -> None:
    layers = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(8, 256), nn.ReLU()) for _ in range(2)])})
    memory.know(layers)
    memory.begin()
    held = [layer(torch.zeros(4, 8)) for layer in layers["layers"]]  # type: ignore[union-attr]
    found = memory.trace(None)
    names = {(owner.module, owner.operator): owner.tensors for owner in found.leaked}
    assert names["layers.*.*", "aten::relu"] == 2
    assert ("", "aten::zeros") in names
    held[0].sum().backward()
    memory.belongs("gradients", {name: each.grad for name, each in layers.named_parameters()})
    gradients = [owner for owner in memory.trace(None).leaked if owner.term == "gradients"]
    assert {owner.module for owner in gradients} == {"layers.*.*.weight", "layers.*.*.bias"}


def test_products_that_exchange_count_what_they_exchange() -> None:
    """The factors of ranks with more heads are larger; what meets is not."""
    x, factor = torch.zeros(2, 3, 5), torch.zeros(5, 7)
    assert record._exchanged("fused_all_gather_matmul", [x, factor]) == (30,)
    assert record._exchanged("fused_matmul_reduce_scatter", [x, factor]) == (42,)
    assert record._exchanged("all_reduce", [x]) == ()


def test_lists_of_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="_fused_adamw_ of tensors on cpu and meta"):
        record._check_lists("_fused_adamw_", ([torch.zeros(2)], [torch.zeros(2, device="meta")]))
    record._check_lists("_fused_adamw_", ([torch.zeros(2)], [torch.zeros((), device="meta")]))


def test_reserved_bytes_are_those_of_the_allocator(memory: MemoryRecord) -> None:
    memory.begin()
    held = [tensor(3 * KIB), tensor(1)]
    assert memory.trace(None).reserved_bytes == 0
    # 20 MiB for the tensor between 1 and 10 MiB, 2 MiB for the small one.
    assert memory.trace(CachingAllocator(expandable=False)).reserved_bytes == 22 * KIB**2
    full = memory.trace(CachingAllocator(expandable=False, capacity_bytes=KIB**2))
    assert full.reserved_bytes > KIB**2, "more than the device has"
    assert len(held) == 2


def test_what_orthogonalisation_makes_is_the_optimizers_and_what_its_owners_exchange_is_not() -> None:
    codes = orthogonalised.__code__, WholeMatrices.step.__code__
    assert [owners._facts_of(code)[0] for code in codes] == ["optimizer", "communication"]
