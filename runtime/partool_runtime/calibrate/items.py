"""The items to measure; each item creates its tensors and returns the work to repeat."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from partool_runtime.torch_internals.tensors import scaled_product

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement."""

    kind: str
    """One of gemm, attention, memory, fresh, operator, collective, host_link and adam."""
    name: str
    precision: str
    work: float
    """Amount of work of one call on one rank, in ``work_unit``."""
    work_unit: str
    """One of flop, byte, operator and parameter; collectives count the bytes of the whole tensor."""
    prepare: Callable[[], Work]
    elements: float = 0.0
    """Number of elements that a matrix product reads and writes; 0 for other work."""
    length: int = 0
    """Sequence length of attention; 0 for other work."""
    sides: tuple[int, ...] = ()
    """(m, n, k) of a matrix product, (batch, heads, length, width) of attention, (bytes,) of a collective's whole
    tensor; empty for other work."""
    host_clock: bool = False
    """True if the host's time is measured even on an accelerator."""


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """Sizes of the measured work."""

    layers: tuple[tuple[int, int, int], ...]
    """Rows, output width and input width of each linear layer; a layer has one forward and two backward products."""
    sequences: tuple[tuple[int, int, int, int], ...]
    """Batch size, number of heads, sequence length and head width of each measurement of causal attention."""
    streams: tuple[int, int]
    """Number of operators of the bandwidth measurement, and number of elements (4 bytes each) of each result."""
    collective_bytes: tuple[int, ...]
    adam_parameters: int
    fresh_bytes: int = 1 << 26
    """Size of a tensor that glibc maps anew, which it does from 32 MiB on."""
    link_bytes: int = 1 << 28


_KB, _MB = 1 << 10, 1 << 20
_CPU_LAYERS = ((2048, 192, 192), (1024, 512, 192), (2048, 512, 512), (1024, 1024, 1024), (1024, 2816, 1024))
_GPU_LAYERS = ((4096, 4096, 4096), (8192, 14336, 4096), (8192, 8192, 8192), (16384, 10240, 8192))
_CPU = WorkSizes(
    _CPU_LAYERS, ((8, 6, 256, 32), (8, 4, 256, 64), (4, 4, 256, 128), (1, 8, 1024, 64)), (32, _MB),
    (64 * _KB, 256 * _KB, _MB, 4 * _MB, 16 * _MB), 16 * _MB,
)  # fmt: skip
_GPU = WorkSizes(
    _GPU_LAYERS, ((4, 32, 2048, 128), (1, 32, 8192, 128), (1, 32, 16384, 128)), (8, 64 * _MB),
    (_MB, 8 * _MB, 64 * _MB, 256 * _MB, 1024 * _MB), 64 * _MB,
)  # fmt: skip
CPU_SIZES = {
    "full": _CPU,
    "quick": _CPU,
    "tiny": WorkSizes(((64, 64, 64),), ((1, 2, 64, 64),), (2, 64 * _KB), (4 * _KB, 64 * _KB), 64 * _KB),
}
GPU_SIZES = {
    "full": _GPU,
    "quick": replace(_GPU, sequences=_GPU.sequences[:2]),
    "tiny": WorkSizes(((256, 256, 256),), ((1, 2, 128, 64),), (2, _MB), (64 * _KB, _MB), _MB, _MB),
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
NARROW_HEADS = 0.70
"""Speed of attention with head widths below 96, relative to its speed with width 128, as in the cost model."""
_BACKWARD = 2.5  # fused attention recomputes the scores: five products instead of two (arXiv 2205.14135)
_CHAIN = 100
_TURNS = 8


def items(sizes: WorkSizes, device: torch.device, world: int) -> list[Item]:
    """Return all items to measure on a device; the list is equal on every rank."""
    cuda = device.type == "cuda"
    all_items: list[Item] = []
    for precision in _precisions(cuda):
        all_items += _gemms(sizes, device, precision)
    # On accelerators, fused attention needs 16-bit types.
    for precision in [p for p in _precisions(cuda) if not cuda or p in ("bf16", "fp16")]:
        all_items += [_attention(shape, device, precision) for shape in sizes.sequences]
    all_items += _streams(sizes, device)
    if not cuda:
        all_items.append(Item("fresh", f"first writes to {sizes.fresh_bytes} bytes", "fp32", sizes.fresh_bytes, "byte",
                          partial(_fresh, sizes.fresh_bytes)))  # fmt: skip
    all_items.append(Item("operator", f"{_CHAIN} element-wise operators", "fp32", 2 * _CHAIN, "operator",
                      partial(_operators, device), host_clock=True))  # fmt: skip
    if world > 1:
        all_items += _collectives(sizes, device, world)
    if cuda:
        all_items += [
            Item("host_link", name, "", sizes.link_bytes, "byte", partial(_link, sizes.link_bytes, device, name))
            for name in ("host to device", "device to host")
        ]
    count = sizes.adam_parameters
    all_items.append(Item("adam", f"fused AdamW on the CPU, {count} parameters", "fp32", count, "parameter",
                      partial(_adam, count), host_clock=True))  # fmt: skip
    return all_items


def _precisions(cuda: bool) -> list[str]:
    """Return the precisions that the device supports; fp8 products of torch need compute capability 8.9."""
    if not cuda:
        return [*DTYPES]
    precisions = ["fp32", *(["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []), "fp16"]
    return precisions + ["fp8"] * (torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9))


def _gemms(sizes: WorkSizes, device: torch.device, precision: str) -> Iterator[Item]:
    """Yield the items for the products of linear layers: the output, the input's gradient and the weight's gradient."""
    for rows, out, width in sizes.layers:
        flops = 2.0 * rows * out * width
        for name, (m, n, k) in (
            ("forward", (rows, out, width)),
            ("input gradient", (rows, width, out)),
            ("weight gradient", (out, width, rows)),
        ):
            make = partial(_gemm, m, n, k, device, precision)
            elements = float(m * k + k * n + m * n)
            yield Item("gemm", f"{name} {m}x{n}x{k}", precision, flops, "flop", make, elements, sides=(m, n, k))


def _gemm(m: int, n: int, k: int, device: torch.device, precision: str) -> Work:
    """Return a function that computes a matrix product.

    On a CPU each call uses another input and another result, as layers do, so that caches help less. The results exist,
    because training's steps use memory that the step before has freed.
    """
    if precision == "fp8":
        return scaled_product(m, n, k, device)
    count = 1 if device.type == "cuda" else _TURNS
    inputs = itertools.cycle([torch.randn(m, k, device=device).to(DTYPES[precision]) for _ in range(count)])
    b = torch.randn(n, k, device=device).to(DTYPES[precision])
    if device.type == "cuda":
        return lambda: torch.matmul(next(inputs), b.t())
    results = itertools.cycle([torch.zeros(m, n, dtype=DTYPES[precision]) for _ in range(count)])
    return lambda: torch.matmul(next(inputs), b.t(), out=next(results))


def _attention(shape: tuple[int, int, int, int], device: torch.device, precision: str) -> Item:
    batch, heads, length, width = shape
    # Two products per pair of tokens; a causal query sees half of the keys. The work of narrow heads is converted
    # to the work of wide heads in the same time, since the plans' figure is for wide heads.
    flops = 2.0 * batch * length * (length / 2) * 2 * heads * width * (1 + _BACKWARD)

    def prepare() -> Work:
        dtype = DTYPES[precision]
        q, k, v = (torch.randn(batch, heads, length, width, device=device).to(dtype).requires_grad_() for _ in range(3))
        grad = torch.randn(batch, heads, length, width, device=device).to(dtype)

        def work() -> object:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), grad)

        return work

    work_flops = flops / (1.0 if width >= 96 else NARROW_HEADS)
    return Item(
        "attention", "x".join(map(str, shape)), precision, work_flops, "flop", prepare, length=length, sides=shape
    )


def _streams(sizes: WorkSizes, device: torch.device) -> Iterator[Item]:
    """Yield the items for chains of operators; an operator reads the previous result and writes another tensor.

    On accelerators results are new tensors, which are kept, as layers keep them.
    """
    number, count = sizes.streams
    if device.type == "cpu":
        yield from _host_streams(number, count)
        return

    def chain(operator: Callable[..., torch.Tensor], other: bool) -> Work:
        first = torch.ones(count, device=device)
        factor = (torch.ones(count, device=device),) * other

        def work() -> None:
            kept = [first]
            for _ in range(number):
                kept.append(operator(kept[-1], *factor))

        return work

    for name, operator, other in (("negate", torch.neg, False), ("multiply", torch.mul, True)):
        moved = 4.0 * (3 if other else 2) * count * number
        yield Item("memory", name, "fp32", moved, "byte", partial(chain, operator, other))


def _host_streams(number: int, count: int) -> Iterator[Item]:
    """Yield the items for chains of operators on a CPU.

    Results go to tensors that exist: training's steps use memory that the step before has freed, whereas glibc may
    return this chain's memory between its repeats. A second operand is another tensor each time, as in gates and
    residual sums, so that no cache holds it. An activation takes longer than its reads and writes.
    """

    def chain(operator: Callable[..., object], other: bool) -> Work:
        results = [torch.ones(count) for _ in range(number + 1)]
        others = [torch.ones(count) for _ in range(number)] if other else []

        def work() -> None:
            for index in range(number):
                operator(results[index], *others[index : index + 1], out=results[index + 1])

        return work

    silu = torch.ops.aten.silu.out
    for name, operator, other in (("negate", torch.neg, False), ("multiply", torch.mul, True), ("silu", silu, False)):
        moved = 4.0 * (3 if other else 2) * count * number
        yield Item("memory", name, "fp32", moved, "byte", partial(chain, operator, other))


def _fresh(size: int) -> Work:
    """Return a function that maps memory, as glibc does for a large tensor, and writes to it.

    torch would put a tensor into memory that earlier items have freed, if a part of it is large enough.
    """

    def work() -> torch.Tensor:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)

    return work


def _operators(device: torch.device) -> Work:
    """Return a function that runs operators on a few numbers, forward and backward; its run time is launch overhead."""
    start = torch.randn(8, 8, device=device, requires_grad=True)

    def work() -> object:
        x = start
        for _ in range(_CHAIN):
            x = F.silu(x)
        grads = torch.autograd.grad(x, start, start.detach())
        if device.type == "cuda":
            torch.cuda.synchronize()
        return grads

    return work


def _collectives(sizes: WorkSizes, device: torch.device, world: int) -> Iterator[Item]:
    for size in sizes.collective_bytes:
        part = size // 4 // world

        def gather(part: int = part) -> Work:
            mine, full = torch.zeros(part, device=device), torch.zeros(part * world, device=device)
            return partial(getattr(dist, _GATHER), full, mine)

        def scatter(part: int = part) -> Work:
            mine, full = torch.zeros(part, device=device), torch.zeros(part * world, device=device)
            return partial(getattr(dist, _SCATTER), mine, full)

        def reduce(part: int = part) -> Work:
            return partial(dist.all_reduce, torch.zeros(part * world, device=device))

        for name, prepare in (("all_gather", gather), ("reduce_scatter", scatter), ("all_reduce", reduce)):
            tensor_bytes = 4 * part * world
            yield Item(
                "collective", f"{name} {size}", "fp32", float(tensor_bytes), "byte", prepare, sides=(tensor_bytes,)
            )


def _link(size: int, device: torch.device, name: str) -> Work:
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    if name == "host to device":
        return partial(on_device.copy_, host, non_blocking=True)
    return partial(host.copy_, on_device, non_blocking=True)


def _adam(count: int) -> Work:
    parameter = torch.nn.Parameter(torch.randn(count))
    parameter.grad = torch.randn(count)
    return torch.optim.AdamW([parameter], fused=True).step
