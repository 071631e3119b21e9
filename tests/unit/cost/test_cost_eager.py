"""Element-wise work on a CPU: counts of reads and writes against operators that run, and memory that is mapped anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partool.cost.case import Layouts
from partool.cost.kinds import kinds
from partool.cost.time import eager
from partool.cost.time.head import head_s
from partool.cost.time.layer import layer
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.work.stacks import own_stack
from partool.work.training import TrainingWork
from partool_runtime.model.decoder import Block, Contexts

MODEL = ModelConfig(layers=1, hidden=64, ffn_hidden=128, heads=4, kv_heads=4, head_dim=16, vocab=8192)
BATCH, LENGTH = 8, 16
CPU = Devices(
    accelerator="cpu", backend="cpu", nodes=1, per_node=1, memory_bytes=2**34, peak_flops=None, achievable_flops=1e11,
    memory_bytes_per_s=30e9, fresh_bytes_per_s=2e9, link_bytes_per_s=1e9, fabric_bytes_per_s=1e9,
)  # fmt: skip
_PRODUCTS = ("mm", "addmm", "scaled_dot_product")


class Moved(TorchDispatchMode):
    """Counts the numbers that operators read and write, except products and attention."""

    numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        name = func.__name__
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        known = {one.untyped_storage().data_ptr() for one in given}
        computes = any(one.untyped_storage().data_ptr() not in known for one in made) or name.split(".")[0][-1] == "_"
        if computes and not any(product in name for product in _PRODUCTS):
            self.numbers += sum(_stored(one) for one in (*given, *made))
        return found


def _stored(tensor: torch.Tensor) -> int:
    """Return how many numbers a tensor holds in memory; expanded dimensions hold none."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(torch.Size(sizes).numel())


def measured(model: ModelConfig) -> tuple[float, float]:
    """Return the numbers per token that a block's forward and backward pass read and write."""
    block, x = Block(model, 0), torch.randn(BATCH, LENGTH, model.hidden, requires_grad=True)
    context, grad = Contexts(model)(x), torch.randn(BATCH, LENGTH, model.hidden)
    with Moved() as forward:
        out = block(x, context)
    with Moved() as backward:
        torch.autograd.grad(out, [x, *block.parameters()], grad)
    return forward.numbers / (BATCH * LENGTH), backward.numbers / (BATCH * LENGTH)


@pytest.mark.parametrize(
    "changes", [{}, {"norm": "layernorm", "activation": "gelu", "position": "learned", "max_position": LENGTH}]
)
def test_counts_are_those_of_the_operators_that_run(changes: dict[str, Any]) -> None:
    model = MODEL.model_copy(update=changes)
    stream = 10.0 * model.hidden
    turned = 4.0 * model.heads * model.head_dim if model.position == "rope" else 0.0
    inner = (3.0 if model.gated else 2.0) * model.ffn_hidden
    for numbers, backward in zip(measured(model), (False, True), strict=True):
        counted = sum(
            width * eager.traffic(model, part, backward=backward)
            for part, width in (("norm", stream), ("rope", turned), ("glu", inner))
        )
        assert counted == pytest.approx(numbers, rel=0.02)


def job(rows: int, **figures: Any) -> tuple[TrainingWork, Layouts]:
    devices = CPU.model_copy(update=figures)
    return TrainingWork(MODEL, devices, 1024, "fp32", own_stack("cpu", "none"), global_batch=rows), Layouts(
        micro_batch=rows
    )


def extra_s(seconds: Callable[[TrainingWork, Layouts], Any], rows: int) -> float:
    """Return the seconds that first writes to new memory add."""
    with_it, without = job(rows), job(rows, fresh_bytes_per_s=None)
    return float(seconds(*with_it)) - float(seconds(*without))


@pytest.mark.parametrize("backward", [False, True])
def test_large_tensors_of_logits_are_mapped_anew(backward: bool) -> None:
    def head(job: TrainingWork, layouts: Layouts) -> Any:
        return head_s(job, layouts, backward=backward)

    byte_s = 1 / 2e9 - 1 / 30e9
    assert extra_s(head, 1) == pytest.approx(2 * 2**25 * byte_s)
    assert eager.mapped_s(job(1)[0], 2**25 - 1, 2**25) == 0.0
    assert eager.mapped_s(job(1, backend="cuda")[0], 2**25, 2**25) == 0.0
    assert eager.mapped_s(job(1, memory_bytes_per_s=1e9)[0], 2**25, 2**25) == 0.0


def test_large_tensors_of_networks_are_mapped_anew() -> None:
    def forward(job: TrainingWork, layouts: Layouts) -> Any:
        return layer(job, layouts, kinds(MODEL)[0]).forward.elementwise_s

    byte_s = 1 / 2e9 - 1 / 30e9
    assert extra_s(forward, 63) == 0.0
    assert extra_s(forward, 64) == pytest.approx(4 * 2**25 * byte_s)
