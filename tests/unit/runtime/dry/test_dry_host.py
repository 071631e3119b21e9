"""Dry runs of plans with state in host memory, on a host that has none."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from planned import plan_of
from test_dry import dry

from partool_kernels.host import HostKernelError, IdlePool, Part, StepRule, UpdatePass, accumulate, sums, update, zero
from partool_runtime.dry.host import absent_host
from partool_runtime.errors import ConfigurationError
from partool_runtime.torch_internals.tensors import FakeTensorMode

WIDE = """\
model: {hidden: 16384, layers: 3, heads: 128, kv_heads: 16, vocab: 32000, ffn_hidden: 65536}
hardware: {accelerator: h100-sxm, per_node: 4}
data: python-stdlib
training: {global_batch: 8, sequence_length: 4096, steps: 3}
parallel: {tensor: 1, sequence: 1, pipeline: 1, data: {zero: 3},
           offload: {optimizer: cpu, parameters: cpu, activations: cpu}}
"""
"""A rank holds 40 GB of weights, masters and moments in host memory, and several GB of activations."""


@pytest.mark.timeout(60)
def test_state_in_host_memory_takes_no_memory(tmp_path: Path) -> None:
    code, (trace,) = dry(plan_of(WIDE), tmp_path, 0)
    assert code == 0
    gathers = [each for each in trace["collectives"] if each[0] == "_allgather_base_"]
    assert sum(sum(each[3]) for each in gathers) > 2 * 3 * 4 * 16384 * 16384, "every layer is gathered twice"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 3 * 2**20, "the largest child held 3 GiB"


def test_limits_of_pinned_memory_hold() -> None:
    host = absent_host(FakeTensorMode)
    memory = host.memory(pinned=True, limit_bytes=2**40)
    assert memory.tensor(2**38, torch.float32, "gradients").shape == (2**38,)
    with pytest.raises(ConfigurationError, match="limit") as error:
        memory.take(1, "weights")
    assert error.value.code == "PT675"


def test_passes_on_an_idle_pool_read_nothing() -> None:
    """Fake tensors have no memory that a pass could read."""
    rule = StepRule("adamw", 1e-3, 0.9, 0.95, 1e-8, 0.1, 1)
    with FakeTensorMode():
        master, first, second, gradient = (torch.empty(2**40) for _ in range(4))
    pool, part = IdlePool(4), Part(master, (first, second))
    zero([master], pool=pool)
    accumulate([master], [gradient], first=False, pool=pool)
    found = update([part], step=UpdatePass([gradient], [rule]), weights=[master], wants_sums=True, pool=pool)
    assert found == sums([gradient], pool=pool)
    assert found is not None
    assert (sum(map(sum, found.squares)), found.finite) == (0.0, (True,))
    with pytest.raises(HostKernelError, match="2 gradients for 1 parts"):
        update([part], step=UpdatePass([gradient] * 2, [rule]), pool=pool)
