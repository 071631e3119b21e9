"""Saved tensors in host memory: the same gradients, nothing moved twice, nothing held for longer than it must be."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from partool.spec.model import ModelConfig
from partool_runtime.model import Decoder
from partool_runtime.offload import Activations, HostMemory, Slabs
from partool_runtime.offload.lanes import CopyLane, Mark, ThreadLanes
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_networks

CPU = torch.device("cpu")
LAYERS, LENGTH, HIDDEN = 5, 17, 30
SLAB_BYTES = 3000
"""Smaller than most tensors, and a divisor of none."""
INPUTS_BYTES = 2 * LENGTH * HIDDEN * 8


def decoder(**fields: Any) -> Decoder:
    sizes = {
        "layers": LAYERS,
        "hidden": HIDDEN,
        "ffn_hidden": 37,
        "heads": 5,
        "kv_heads": 5,
        "head_dim": 6,
        "vocab": 57,
    }
    windows = {"window": 6, "layer_types": ("full", "sliding", "full", "sliding", "full")}
    torch.manual_seed(0)
    return Decoder(ModelConfig.model_validate(sizes | windows | fields)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens, labels = (torch.randint(0, 57, (2, LENGTH), generator=generator) for _ in range(2))
    return tokens, labels


def slabs(slab_bytes: int) -> Slabs:
    return Slabs(HostMemory(pinned=False), slab_bytes=slab_bytes)


@pytest.fixture(autouse=True)
def lanes() -> Iterator[ThreadLanes]:
    """Lanes whose copies are randomly delayed, so that code that does not wait for them reads wrong numbers."""
    lanes = ThreadLanes(Seldom(3))
    Made.lanes = lanes
    yield lanes
    lanes.close()


class Seldom(random.Random):
    """Draws zero in 98 % of cases, so that tests rarely sleep."""

    def random(self) -> float:
        return super().random() * 3 if super().random() < 0.02 else 0.0


class Made:
    lanes: ThreadLanes


def offloaded(model: Decoder, least_bytes: int = 1, ahead: int = 1) -> Activations:
    """Offload the saved tensors of all layers but the last to host memory."""
    activations = Activations(CPU, least_bytes=least_bytes, slabs=slabs(SLAB_BYTES), lanes=Made.lanes, ahead=ahead)
    activations.put(dict(enumerate(model.layers)), last=LAYERS - 1)
    return activations


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("policy", ["none", "attention", "selective", "keep_attention", "full"])
def test_gradients_are_the_same_bits(policy: Any, tokens: int) -> None:
    found = []
    for host in (False, True):
        model = decoder()
        tile_networks(model.layers, tokens)
        recompute(model.layers, [policy] * LAYERS, tiled=tokens > 0)
        activations = offloaded(model) if host else None
        for _ in range(2):
            model(*batch()).backward()
        found.append(gradients(model))
        if activations is not None:
            assert activations.moved_bytes > 0
            assert activations.slabs.used_bytes == 0
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_brought_back_is_what_is_used() -> None:
    """Overwriting host memory changes the gradients, so they are computed from it and not from device memory."""
    model = decoder()
    recompute(model.layers, ["full"] * LAYERS)
    activations = offloaded(model)
    model(*batch()).backward()
    kept = [gradient.clone() for gradient in gradients(model)]
    model.zero_grad()
    total = model(*batch())
    for slab in held_slabs():
        slab.fill_(0)
    total.backward()
    assert activations.slabs.used_bytes == 0
    assert not all(torch.equal(one, other) for one, other in zip(gradients(model), kept, strict=True))


def held_slabs() -> list[torch.Tensor]:
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is torch.Tensor and thing.dtype == torch.uint8 and thing.numel() == SLAB_BYTES
    ]


def test_inputs_alone_move_where_layers_are_computed_again() -> None:
    model = decoder()
    recompute(model.layers, ["full"] * LAYERS)
    activations = offloaded(model)
    total = model(*batch())
    assert activations.moved_bytes == (LAYERS - 1) * INPUTS_BYTES
    slabs = -(-INPUTS_BYTES // SLAB_BYTES)
    assert activations.slabs.used_bytes == (LAYERS - 1) * slabs * SLAB_BYTES
    total.backward()
    model(*batch()).backward()
    # The second pass reuses the slabs of the first.
    assert activations.slabs.held_bytes == (LAYERS - 1) * slabs * SLAB_BYTES
    assert activations.slabs.used_bytes == 0


def test_neither_parameters_nor_shared_tensors_nor_small_ones_move() -> None:
    """A layer's traced tensors move, each storage once; weights, rotary tables and vectors do not."""
    moved = {}
    for least in (1, 2 * LENGTH * 8 + 1, 2**30):
        model = decoder()
        activations = offloaded(model, least)
        model(*batch())
        moved[least] = activations.moved_bytes
    tokens, layers = 2 * LENGTH, LAYERS - 1
    # Two norms keep input and result, attention keeps four tensors of its width, the MLP two inputs and two results.
    whole = 8 * tokens * (4 * HIDDEN + 4 * HIDDEN + 4 * 37)
    assert moved[2 * LENGTH * 8 + 1] >= layers * whole
    assert moved[1] - moved[2 * LENGTH * 8 + 1] <= layers * 8 * tokens * (2 + 2 * 5)
    assert moved[2**30] == 0


def test_views_of_one_memory_move_once() -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half, other = x.exp().chunk(2, dim=-1)
            return torch.cat([half * other, other * half], dim=-1)

    layer, x = Layer(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).square().sum(), x)[0]
    activations = Activations(CPU, least_bytes=1, slabs=slabs(64), lanes=Made.lanes)
    activations.put({0: layer}, last=5)
    got = torch.autograd.grad(layer(x).square().sum(), x)[0]
    assert torch.equal(got, wanted)
    assert activations.moved_bytes == x.numel() * 8  # exp's result, of which both halves are views


def test_passes_in_flight_come_back_in_any_order() -> None:
    """Three forward passes, then their backward passes in the same order, as in a pipeline."""
    found = []
    for host in (False, True):
        model = decoder()
        recompute(model.layers, ["full"] * LAYERS)
        activations = offloaded(model) if host else None
        totals = [model(*(part.roll(shift, 1) for part in batch())) for shift in range(3)]
        for total in totals:
            total.backward()
        found.append(gradients(model))
        if activations is not None:
            assert activations.moved_bytes == 3 * (LAYERS - 1) * INPUTS_BYTES
            assert activations.slabs.used_bytes == 0
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_second_backward_pass_reads_the_host_again() -> None:
    model = decoder()
    offloaded(model)
    total = model(*batch())
    total.backward(retain_graph=True)
    once = [gradient.clone() for gradient in gradients(model)]
    total.backward()
    assert all(torch.allclose(twice, 2 * one) for twice, one in zip(gradients(model), once, strict=True))


def test_what_is_not_passed_back_frees_its_memory() -> None:
    model = decoder()
    activations = offloaded(model)
    total = model(*batch())
    assert activations.slabs.used_bytes > 0
    del total
    gc.collect()
    with torch.no_grad():
        model(*batch())  # moves nothing
    assert activations.slabs.used_bytes <= activations.slabs.held_bytes
    before = activations.moved_bytes
    with torch.no_grad():
        model(*batch())
    assert activations.moved_bytes == before


class Watched:
    """Lane that records each request for a copy."""

    def __init__(self, lane: CopyLane, name: str, log: list[str]) -> None:
        self._lane, self._name, self._log = lane, name, log

    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        self._log.append(self._name)
        return self._lane.copy(to, source, after)


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_what_was_saved_comes_back_ahead_of_its_use(ahead: int, lanes: ThreadLanes) -> None:
    model, wanted = decoder(), decoder()
    recompute(model.layers, ["full"] * LAYERS)
    asked: list[str] = []
    lanes.up = Watched(lanes.up, "up", asked)
    offloaded(model, ahead=ahead)
    total = model(*batch())
    copies, last = -(-INPUTS_BYTES // SLAB_BYTES), LAYERS - 2
    still_there = {last, last - min(ahead, 1)}

    def begins(number: int) -> None:
        """Check before a layer's backward pass that its saved tensors were prefetched ``ahead`` layers earlier."""
        turned = range(number + 1, LAYERS - 1)
        wanted = {before for each in turned for before in range(max(0, each - ahead), each + 1)} - still_there
        assert len(asked) == copies * len(wanted)

    for number, layer in enumerate(model.layers):
        layer.register_full_backward_pre_hook(lambda *_, number=number: begins(number))
    total.backward()
    wanted(*batch()).backward()
    assert len(asked) == copies * (LAYERS - 1 - len(still_there))
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), gradients(wanted), strict=True))


class SlowAtFirst(random.Random):
    waits_ms = 400.0

    def random(self) -> float:
        waits, self.waits_ms = self.waits_ms, 0.0
        return waits


def test_what_comes_back_has_left_before(lanes: ThreadLanes) -> None:
    late = ThreadLanes(SlowAtFirst())
    lanes.down = late.down
    model, wanted = decoder(), decoder()
    recompute(model.layers, ["full"] * LAYERS)
    store = slabs(INPUTS_BYTES)
    Activations(CPU, least_bytes=1, slabs=store, lanes=lanes).put(dict(enumerate(model.layers)), last=LAYERS - 1)
    model(*batch()).backward()
    wanted(*batch()).backward()
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), gradients(wanted), strict=True))
    late.close()


class Awaited:
    """Mark that counts how often compute waits for it."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        raise AssertionError("the host need not wait")

    def before_compute(self) -> None:
        self.waits += 1


def test_copies_of_a_pass_that_was_given_up_are_waited_for() -> None:
    """Otherwise their slabs would be reused while the copies still write to them."""
    store, mark = slabs(64), Awaited()
    goes_to = torch.empty(100)
    alive = weakref.ref(goes_to)
    lent = store.take(100)
    lent.mark, lent.reads = mark, goes_to
    store.give_back(lent)
    del lent, goes_to
    assert alive() is not None
    assert mark.waits == 0
    store.take(128)
    assert mark.waits == 2
    assert alive() is None
    assert store.held_bytes == 128


def test_slabs_that_were_reserved_are_all_there_are() -> None:
    found, memory = [], HostMemory(pinned=False)
    for reserved in (0, 1):
        model = decoder()
        store = Slabs(memory, slab_bytes=SLAB_BYTES)
        store.reserve(reserved * found[0] if found else 0)
        held = store.held_bytes
        memory.freeze()
        Activations(CPU, least_bytes=1, slabs=store, lanes=Made.lanes).put(dict(enumerate(model.layers)), last=4)
        late = memory.late_bytes
        model(*batch()).backward()
        assert store.held_bytes == memory.purposes["activations"] - (found[0] if reserved else 0)
        assert (memory.late_bytes > late) is not bool(reserved)
        assert not reserved or store.held_bytes == held == found[0]
        found.append(store.held_bytes)


def test_what_is_smaller_than_a_slab_takes_a_part_of_one() -> None:
    store = slabs(6400)
    lent = [store.take(size) for size in (100, 101, 1600, 6400, 6400 + 50)]
    # 100 and 101 take a 64th and a 32nd of the first slab, 1600 a quarter of it; 50 takes another 64th.
    assert [sum(map(len, each.slabs)) for each in lent] == [100, 200, 1600, 6400, 6500]
    assert store.made == 3
    assert store.used_bytes == 100 + 200 + 1600 + 6400 + 6500
    memories = [slab for each in lent for slab in each.slabs]
    for number, memory in enumerate(memories):
        memory.fill_(number)
    assert [int(memory.unique()) for memory in memories] == list(range(len(memories)))  # no two overlap
    for each in lent:
        store.give_back(each)
    assert store.used_bytes == 0
    for size in (100, 101, 1600, 6400, 6400 + 50):
        store.take(size)
    assert store.made == 3


def test_pieces_are_put_together_before_a_slab_is_made() -> None:
    store = slabs(6400)
    lent = [store.take(size) for size in (100, 1600, 3200, 6400)]
    assert store.made == 2
    waited: list[int] = []
    for number, each in enumerate(lent[:-1]):
        each.mark = SimpleNamespace(before_compute=partial(waited.append, number))  # type: ignore[assignment]
        store.give_back(each)
    again = store.take(6400)
    assert store.made == 2
    assert set(waited) == {0, 1, 2}
    assert again.slabs[0].data_ptr() == store._slabs[0].data_ptr()
    store.give_back(again)
    part = store.take(100)
    store.give_back(lent[-1])
    store.take(6400)
    store.take(3200)  # beside the part
    assert store.made == 2
    store.take(6400)  # pieces cannot be merged while the part is in use
    assert store.made == 3
    assert len(part.slabs[0]) == 100
