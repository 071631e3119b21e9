"""Ranks of test_weipipe.py: WeiPipe against the same decoder in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from _decoder_worker import CONFIGS, whole

from partool.schedule import Schedule, generate
from partool.schedule.weipipe import VARIANTS, volume, weipipe
from partool.spec.model import ModelConfig, Weights
from partool_runtime.data.batches import MicroBatch
from partool_runtime.model import Decoder
from partool_runtime.parallel.pipeline.types import Done
from partool_runtime.parallel.pipeline.wires import TransferError
from partool_runtime.parallel.weipipe.chunks import Chunk
from partool_runtime.parallel.weipipe.parts import RingDecoder
from partool_runtime.parallel.weipipe.passes import WeiPipePasses
from partool_runtime.parallel.weipipe.ring import Ring, open_ring
from partool_runtime.weights import fill, materialise
from partool_runtime.weights.pipeline import frozen_names, whole_shapes


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


def part(config: ModelConfig, schedule: Schedule, ring: Ring, frozen: tuple[str, ...] = ()) -> RingDecoder:
    with torch.device("meta"):
        model = RingDecoder(config, spans(config.layers, schedule.stages), schedule.on_rank(ring.rank))
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(), seed=4)
    names = frozen_names(whole_shapes(config), frozen) if frozen else set()
    for name, parameter in (*model.named_parameters(), *model.elsewhere()):
        parameter.requires_grad_(name not in names)
    return model


def reference(model: Decoder, micro: list[MicroBatch], weight: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    total = sum(model(one.tokens_BS, one.labels_BS) for one in micro)
    (total * weight).backward()
    return total.detach()


def close(ours: torch.Tensor, theirs: torch.Tensor, limit: float = 1e-12) -> bool:
    return bool((ours - theirs).abs().max() <= limit * max(1.0, float(theirs.abs().max())))


def compare(model: RingDecoder, theirs: Decoder, label: object, limit: float = 1e-12) -> None:
    others = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, (label, name)
            continue
        assert parameter.grad is not None, (label, name)
        assert close(parameter.grad, others[name].grad, limit), (label, name, parameter.grad, others[name].grad)


def nudge(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def check_steps(schedule: Schedule, config: ModelConfig, ring: Ring) -> None:
    """Two steps, with weights that change between: losses, gradients, elements sent, evaluation after them."""
    count, label = schedule.micro_batches, (schedule.name, schedule.ranks, schedule.micro_batches, schedule.chunks)
    model, theirs, done = part(config, schedule, ring), whole(config), list[Done]()
    passes = WeiPipePasses(schedule, model, ring, torch.float64, watch=done.append, timeout_s=60)
    for step in range(2):
        micro, weight = batches(config, count, step), torch.tensor(0.01 + step, dtype=torch.float64)
        for parameter in model.parameters():
            parameter.grad = None
        loss = passes.step(micro, weight, timer)
        dist.all_reduce(loss, group=ring.everyone)
        assert close(loss, reference(theirs, micro, weight)), (label, loss)
        compare(model, theirs, label)
        nudge(model)
        nudge(theirs)
    assert sorted(one.action for one in done) == sorted(2 * schedule.lists[ring.rank]), label
    check_volume(schedule, model, passes, steps=2)
    for number in (1, ring.size, 2 * ring.size + 1):
        micro = batches(config, number, seed=9)
        loss = passes.evaluate(iter(micro), lambda: False)
        assert loss is not None
        dist.all_reduce(loss, group=ring.everyone)
        with torch.no_grad():
            assert close(loss, sum(theirs(one.tokens_BS, one.labels_BS) for one in micro)), (label, number)
    assert passes.evaluate(iter(micro), lambda: True) is None
    passes.close()


def check_volume(schedule: Schedule, model: RingDecoder, passes: WeiPipePasses, steps: int) -> None:
    chunks, nothing = [Chunk(stage) for stage in model.stages], [0] * schedule.stages
    weights = volume(schedule, [chunk.weight_elements for chunk in chunks], nothing)
    gradients = volume(schedule, nothing, [chunk.gradient_elements for chunk in chunks])
    rank = passes._ring.rank
    assert passes.sent == (steps * weights[rank], steps * gradients[rank]), (passes.sent, weights, gradients)


def check_frozen(ring: Ring) -> None:
    """Frozen first stages need no backward pass; single frozen tensors elsewhere do not travel as gradients."""
    config = CONFIGS["untied"].model_copy(update={"layers": 2 * ring.size, "layer_types": ("full",) * 2 * ring.size})
    patterns = ("embed.*", "layers.0.*", "layers.1.*", "*.attention.k.weight")
    for name in VARIANTS:
        schedule = weipipe(name, ring.size, 2 * ring.size, 1, trained_from=1)
        model, theirs = part(config, schedule, ring, patterns), whole(config)
        passes = WeiPipePasses(schedule, model, ring, torch.float64, timeout_s=60)
        micro, weight = batches(config, schedule.micro_batches), torch.tensor(0.1, dtype=torch.float64)
        passes.step(micro, weight, timer)
        reference(theirs, micro, weight)
        compare(model, theirs, name)
        check_volume(schedule, model, passes, steps=1)
        passes.close()


def check_narrow(ring: Ring) -> None:
    """Weights travel and are used in float32, gradients are summed in the parameters' float64."""
    schedule = generate("weipipe", ring.size, 2 * ring.size)
    config = CONFIGS["tied"].model_copy(update={"layers": ring.size, "layer_types": ("full",) * ring.size})
    model, theirs = part(config, schedule, ring), whole(config)
    passes = WeiPipePasses(schedule, model, ring, torch.float32, timeout_s=60)
    micro, weight = batches(config, schedule.micro_batches), torch.tensor(0.1, dtype=torch.float64)
    passes.step(micro, weight, timer)
    reference(theirs, micro, weight)
    compare(model, theirs, "float32", limit=1e-5)
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    assert not close(model.embed.weight.grad, theirs.embed.weight.grad)
    passes.close()


def check_replicas() -> None:
    """Two rings of two ranks: gradients are summed over both, which see different micro-batches."""
    place = dist.get_rank() // 2, dist.get_rank() % 2
    ring = open_ring([[0, 1], [2, 3]])
    pairs = [dist.new_group([rank, rank + 2]) for rank in range(2)]
    config = CONFIGS["gpt"].model_copy(update={"layers": 3, "layer_types": ("full",) * 3})
    for name in VARIANTS:
        schedule = generate(name, 2, 4)
        model, theirs = part(config, schedule, ring), whole(config)
        passes = WeiPipePasses(schedule, model, ring, torch.float64, replicas=pairs[place[1]], timeout_s=60)
        micro, weight = batches(config, 8), torch.tensor(0.1, dtype=torch.float64)
        loss = passes.step(micro[4 * place[0] :][:4], weight, timer)
        dist.all_reduce(loss)
        assert close(loss, reference(theirs, micro, weight))
        compare(model, theirs, name)
        passes.close()


def check_silent_peer(ring: Ring) -> None:
    """A rank that does nothing: the others say what they waited for, in time."""
    schedule = generate("weipipe", ring.size, ring.size)
    config = CONFIGS["tied"].model_copy(update={"layers": ring.size, "layer_types": ("full",) * ring.size})
    model = part(config, schedule, ring)
    passes = WeiPipePasses(schedule, model, ring, torch.float64, timeout_s=2)
    dist.barrier()
    if ring.rank == 1:
        dist.distributed_c10d._get_default_store().wait(["told"], timedelta(seconds=60))
        return
    message = ""
    try:
        passes.step(batches(config, ring.size), torch.tensor(1.0, dtype=torch.float64), timer)
    except TransferError as error:
        message = str(error)
    assert f"pipeline rank {ring.rank}, " in message, message
    if ring.rank == 0:
        # Stage 0 is rank 1's: its weights should have been dealt.
        assert "0RECV_FW0" in message, message
        assert "from pipeline rank 1" in message, message
        dist.distributed_c10d._get_default_store().set("told", b"")
    else:
        dist.distributed_c10d._get_default_store().wait(["told"], timedelta(seconds=60))


def parity(ring: Ring) -> None:
    for name in VARIANTS:
        for rounds, chunks, kind in ((1, 1, "untied"), (2, 1, "gpt"), (3, 2, "tied")):
            schedule = generate(name, ring.size, rounds * ring.size, chunks)
            layers = schedule.stages + 1
            kinds = ("full", "sliding", *("full",) * layers)[:layers]
            check_steps(schedule, CONFIGS[kind].model_copy(update={"layers": layers, "layer_types": kinds}), ring)


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ring = open_ring([list(range(dist.get_world_size()))])
    checks: list[Callable[[Ring], None]] = [parity, check_frozen, check_narrow]
    for check in checks:
        check(ring)
    if ring.size == 4:
        check_replicas()
    check_silent_peer(ring)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
