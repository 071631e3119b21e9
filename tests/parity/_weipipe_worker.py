"""Ranks of test_weipipe.py: WeiPipe against the same decoder in one process."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from _decoder_worker import CONFIGS, whole

from partool.schedule import Schedule, generate
from partool.schedule.simulate import peak_held
from partool.schedule.weipipe import VARIANTS, volume, weipipe
from partool.spec.model import ModelConfig, Weights
from partool_runtime.data.batches import MicroBatch
from partool_runtime.groups import Groups
from partool_runtime.parallel.pipeline.types import Done
from partool_runtime.parallel.pipeline.wires import TransferError
from partool_runtime.parallel.weipipe.chunks import Chunk
from partool_runtime.parallel.weipipe.parts import RingDecoder
from partool_runtime.parallel.weipipe.passes import WeiPipePasses
from partool_runtime.parallel.weipipe.ring import PipelineRing, open_ring
from partool_runtime.weights import fill, frozen_names, materialise, whole_shapes


def timer(_: str) -> nullcontext[None]:
    return nullcontext()


def batches(config: ModelConfig, count: int, seed: int = 0) -> list[MicroBatch]:
    """Micro-batches with more and more ignored labels, the last of a few with none left."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        tokens_BS = torch.randint(config.vocab, (2, 7), generator=generator)
        labels_BS = tokens_BS.roll(-1, 1)
        labels_BS.view(-1)[: (3 * number) % 15] = -100
        found.append(MicroBatch(tokens_BS, labels_BS))
    return found


def spans(layers: int, stages: int) -> list[tuple[int, int]]:
    """Uneven: what is over goes to the last stages."""
    sizes = [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
    return list(pairwise([0, *accumulate(sizes)]))


def part(config: ModelConfig, schedule: Schedule, ring: PipelineRing, frozen: tuple[str, ...] = ()) -> RingDecoder:
    with torch.device("meta"):
        model = RingDecoder(config, spans(config.layers, schedule.stages), schedule.on_rank(ring.rank))
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(), seed=4)
    names = frozen_names(whole_shapes(config), frozen) if frozen else set()
    for name, parameter in (*model.named_parameters(), *model.elsewhere()):
        parameter.requires_grad_(name not in names)
    return model


class Expected:
    """One process's losses and gradients, worked out by rank 0 of a ring for all."""

    def __init__(self, config: ModelConfig, count: int, ring: PipelineRing) -> None:
        self.config, self._ring = config, ring
        self.batches = [batches(config, count, step) for step in range(2)]
        self.weights = [torch.tensor(0.01 + step, dtype=torch.float64) for step in range(2)]
        self.theirs = whole(config)
        self.losses: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        for micro, weight in zip(self.batches, self.weights, strict=True):
            self.theirs.zero_grad()
            self.losses.append(self._from_first(lambda micro=micro, weight=weight: self._backward(micro, weight)))
            for parameter in self.theirs.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([p.grad.flatten() for p in self.theirs.parameters()])
            parts = self._from_first(lambda flat=flat: flat).split([p.numel() for p in self.theirs.parameters()])
            names = self.theirs.named_parameters()
            self.gradients.append({n: part.view_as(p) for (n, p), part in zip(names, parts, strict=True)})
            nudge(self.theirs)
        self.evaluated = batches(config, 2 * ring.size + 1, seed=9)
        self.evaluations = self._from_first(lambda: torch.stack([self._loss(one) for one in self.evaluated]))

    def _from_first(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = [make() if self._ring.rank == 0 else None]
        dist.broadcast_object_list(made, group=self._ring.relay, group_src=0)
        return made[0]

    def _backward(self, micro: list[MicroBatch], weight: torch.Tensor) -> torch.Tensor:
        total = sum(self.theirs(one.tokens_BS, one.labels_BS) for one in micro)
        (total * weight).backward()
        return total.detach()

    @torch.no_grad()
    def _loss(self, micro: MicroBatch) -> torch.Tensor:
        return self.theirs(micro.tokens_BS, micro.labels_BS)


def close(ours: torch.Tensor, theirs: torch.Tensor, limit: float = 1e-12) -> bool:
    return bool((ours - theirs).abs().max() <= limit * max(1.0, float(theirs.abs().max())))


def compare(model: RingDecoder, theirs: dict[str, torch.Tensor], label: object, limit: float = 1e-12) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, (label, name)
            continue
        assert parameter.grad is not None, (label, name)
        assert close(parameter.grad, theirs[name], limit), (label, name, parameter.grad, theirs[name])


def nudge(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def check_steps(schedule: Schedule, expected: Expected, ring: PipelineRing) -> None:
    """Two steps, with weights that change between: losses, gradients, elements sent, evaluation after them."""
    label = (schedule.name, schedule.ranks, schedule.micro_batches, schedule.chunks)
    model, done = part(expected.config, schedule, ring), list[Done]()
    passes = WeiPipePasses(schedule, model, ring, torch.float64, watch=done.append, timeout_s=60)
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        loss = passes.step(expected.batches[step], expected.weights[step], timer)
        dist.all_reduce(loss, group=ring.relay)
        assert close(loss, expected.losses[step]), (label, loss)
        compare(model, expected.gradients[step], label)
        assert passes.peak_live == peak_held(schedule.lists[ring.rank]), (label, passes.peak_live)
        nudge(model)
    assert sorted(one.action for one in done) == sorted(2 * schedule.lists[ring.rank]), label
    check_volume(schedule, model, passes, steps=2)
    for number in (1, ring.size, 2 * ring.size + 1):
        loss = passes.evaluate(iter(expected.evaluated[:number]), lambda: False)
        assert loss is not None
        dist.all_reduce(loss, group=ring.relay)
        assert close(loss, expected.evaluations[:number].sum()), (label, number)
    assert passes.evaluate(iter(expected.evaluated), lambda: True) is None
    passes.close()


def check_volume(schedule: Schedule, model: RingDecoder, passes: WeiPipePasses, steps: int) -> None:
    chunks, nothing = [Chunk(stage) for stage in model.stages], [0] * schedule.stages
    weights = volume(schedule, [chunk.weight_elements for chunk in chunks], nothing)
    gradients = volume(schedule, nothing, [chunk.gradient_elements for chunk in chunks])
    rank = passes._ring.rank
    assert passes.sent == (steps * weights[rank], steps * gradients[rank]), (passes.sent, weights, gradients)


def check_frozen() -> None:
    """Frozen first stages need no backward pass; single frozen tensors elsewhere do not travel as gradients."""
    ring = ring_of(4)
    config = CONFIGS["untied"].model_copy(update={"layers": 2 * ring.size, "layer_types": ("full",) * 2 * ring.size})
    patterns = ("embed.*", "layers.0.*", "layers.1.*", "*.attention.k.weight")
    expected = Expected(config, 2 * ring.size, ring)
    for name in VARIANTS:
        schedule = weipipe(name, ring.size, 2 * ring.size, 1, trained_from=1)
        model = part(config, schedule, ring, patterns)
        passes = WeiPipePasses(schedule, model, ring, torch.float64, timeout_s=60)
        passes.step(expected.batches[0], expected.weights[0], timer)
        compare(model, expected.gradients[0], name)
        assert passes.peak_live == peak_held(schedule.lists[ring.rank]), (name, passes.peak_live)
        check_volume(schedule, model, passes, steps=1)
        passes.close()


def check_narrow() -> None:
    """Weights travel and are used in float32, gradients are summed in the parameters' float64."""
    ring = ring_of(4)
    schedule = generate("weipipe", ring.size, 2 * ring.size)
    config = CONFIGS["tied"].model_copy(update={"layers": ring.size, "layer_types": ("full",) * ring.size})
    model, expected = part(config, schedule, ring), Expected(config, 2 * ring.size, ring)
    passes = WeiPipePasses(schedule, model, ring, torch.float32, timeout_s=60)
    passes.step(expected.batches[0], expected.weights[0], timer)
    compare(model, expected.gradients[0], "float32", limit=1e-5)
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    weights, gradients = passes.sent
    assert passes.sent_bytes == 4 * weights + 8 * gradients
    assert not close(model.embed.weight.grad, expected.gradients[0]["embed.weight"])
    passes.close()


def check_replicas() -> None:
    """Two rings of two ranks: gradients are summed over both, which see different micro-batches."""
    ring = ring_of(2)
    place = dist.get_rank() // 2, dist.get_rank() % 2
    pairs = [dist.new_group([rank, rank + 2]) for rank in range(2)]
    config = CONFIGS["gpt"].model_copy(update={"layers": 3, "layer_types": ("full",) * 3})
    expected = Expected(config, 8, ring)
    for name in VARIANTS:
        schedule = generate(name, 2, 4)
        model = part(config, schedule, ring)
        passes = WeiPipePasses(
            schedule, model, ring, torch.float64, replicas=pairs[place[1]], everyone=dist.group.WORLD, timeout_s=60
        )
        loss = passes.step(expected.batches[0][4 * place[0] :][:4], expected.weights[0], timer)
        dist.all_reduce(loss)
        assert close(loss, expected.losses[0])
        compare(model, expected.gradients[0], name)
        passes.close()


def check_lost_peer(gone: bool) -> None:
    """Rank 1 does nothing, or is gone: the others say what they waited for, in time."""
    ring = ring_of(4)
    schedule = generate("weipipe", ring.size, ring.size)
    config = CONFIGS["tied"].model_copy(update={"layers": ring.size, "layer_types": ("full",) * ring.size})
    model = part(config, schedule, ring)
    passes = WeiPipePasses(schedule, model, ring, torch.float64, timeout_s=30 if gone else 1)
    dist.barrier()
    started_s = time.monotonic()
    message = ""
    if ring.rank == 1:
        if gone:
            os._exit(0)
    else:
        try:
            passes.step(batches(config, ring.size), torch.tensor(1.0, dtype=torch.float64), timer)
        except TransferError as error:
            message = str(error)
        assert f"pipeline rank {ring.rank}, " in message, message
        assert time.monotonic() - started_s < 25
    if ring.rank == 0:
        # Stage 0 is rank 1's: its weights should have been dealt.
        assert "0RECV_FW0 (stage 0, turn 0) from pipeline rank 1" in message, message
        assert ("nothing moved for 1 s" in message) is not gone, message
    if not gone:
        dist.barrier()
    else:
        os._exit(0)  # as a run would: its neighbour waits for it, and not for rank 1


@functools.cache
def ring_of(ranks: int) -> PipelineRing:
    """Return rings of so many ranks; the remaining ranks of the world are a ring of their own."""
    torch.use_deterministic_algorithms(True)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world = dist.get_world_size()
    return open_ring(
        Groups(), tuple(tuple(range(first, min(first + ranks, world))) for first in range(0, world, ranks))
    )


def parity(ranks: int) -> None:
    """Compare every variant on rings of so many ranks with one process."""
    ring = ring_of(ranks)
    for rounds, chunks, kind in ((1, 1, "untied"), (2, 1, "gpt"), (2, 2, "tied")):
        layers = ring.size * chunks + 1
        kinds = ("full", "sliding", *("full",) * layers)[:layers]
        config = CONFIGS[kind].model_copy(update={"layers": layers, "layer_types": kinds})
        expected = Expected(config, rounds * ring.size, ring)
        for name in VARIANTS:
            check_steps(generate(name, ring.size, rounds * ring.size, chunks), expected, ring)
