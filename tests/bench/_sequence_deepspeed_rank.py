"""One rank of ``sequence_deepspeed.py``: ``python _sequence_deepspeed_rank.py JOB RESULT``.

Projections are computed. Scores and values are computed if no rates are given; else the rank waits for as long as they
would take. Both sides have the same module, the same group and the same tokens, and run in turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from _sequence_job import Job, Shape
from _sequence_rank import Clock, _start_together, _Waiting, seen
from torch import nn

from partool.layout.sequence import shares
from partool.spec.model import ModelConfig
from partool_runtime.model import Block, attend
from partool_runtime.model.attention import AttentionLayout, Context, SelfAttention, Tokens
from partool_runtime.parallel.comm import CommCounter
from partool_runtime.parallel.sequence import ulysses
from partool_runtime.parallel.sequence.types import SequenceTeam


class Side:
    """An attention implementation on this rank: ``partool`` or ``deepspeed``."""

    def __init__(self, title: str, job: Job, team: SequenceTeam) -> None:
        self.title, self.job, self.team = title, job, team
        self.clock = Clock(job.flops_per_s)
        self.block = block_of(job.shape)
        self.index = torch.tensor(team.index(team.rank))
        self.context = Context(None, Tokens(job.shape.length, self.index))
        self.x = whole(job.shape)[:, self.index].clone().requires_grad_()
        self.grad = whole(job.shape, seed=1)[:, self.index].clone()
        self.steps: list[dict[str, float]] = []
        self.forward: Callable[[torch.Tensor], torch.Tensor]
        attention = self.block.attention
        core = self._wait if job.rate_mbit else attend
        if title == "partool":
            cast(Any, attention).core = core
            ulysses.put([self.block], team, cast(Any, None))
            self.forward = lambda x_BSH: attention(x_BSH, self.context)
        else:
            distributed = distributed_attention(core, team)
            self.forward = lambda x_BSH: by_deepspeed(attention, distributed, team.ranks, x_BSH)

    def _wait(self, q: Any, k: Any, v: Any, layout: AttentionLayout, tokens: Tokens | None) -> torch.Tensor:
        out: torch.Tensor = _Waiting.apply(q, k, v, seen(q.shape[2], layout.window), self.clock)  # type: ignore[no-untyped-call]
        return out

    def step(self) -> None:
        """Run one step with the others and note when it ended."""
        self.x.grad = None
        self.block.zero_grad()
        start = _start_together()
        self.forward(self.x).backward(self.grad)
        self.steps.append({"start_s": start, "stop_s": time.perf_counter()})
        dist.barrier()

    def sent_bytes(self) -> int:
        """Run one step and return the bytes that this rank sends to others."""
        with CommCounter() as counter:
            self.forward(self.x).backward(self.grad)
        return sum(traffic.sent_bytes for kind, traffic in counter.snapshot().items() if kind == "all_to_all")

    def apart(self) -> float:
        """Return the largest difference of results and gradients from those of one process."""
        block, x = block_of(self.job.shape), whole(self.job.shape).requires_grad_()
        expected = block.attention(x, Context(None, Tokens(self.job.shape.length)))
        expected.backward(whole(self.job.shape, seed=1))
        self.x.grad = None
        self.block.zero_grad()
        out = self.forward(self.x)
        out.backward(self.grad)
        assert x.grad is not None
        assert self.x.grad is not None
        pairs = [(out, expected[:, self.index]), (self.x.grad, x.grad[:, self.index])]
        for mine, parameter in zip(self.block.attention.parameters(), block.attention.parameters(), strict=True):
            assert mine.grad is not None
            assert parameter.grad is not None
            dist.all_reduce(mine.grad, group=self.team.group)
            pairs.append((mine.grad, parameter.grad))
        return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def by_deepspeed(attention: SelfAttention, distributed: nn.Module, ranks: int, x_BSH: torch.Tensor) -> torch.Tensor:
    """Return an attention module's output for this rank's tokens, exchanged as DeepSpeed does."""
    width = attention.head_dim
    q, k, v = (linear(x_BSH).unflatten(-1, (-1, width)) for linear in (attention.q, attention.k, attention.v))
    if k.shape[2] < ranks:  # as DeepSpeed advises: a copy of keys for every rank
        k, v = (heads.repeat_interleave(ranks // k.shape[2], dim=2) for heads in (k, v))
    out: torch.Tensor = attention.o(distributed(q, k, v, 0).flatten(-2))
    return out


def distributed_attention(core: Callable[..., torch.Tensor], team: SequenceTeam) -> nn.Module:
    """Return DeepSpeed's ``DistributedAttention`` around a core."""
    sys.path.append(os.environ["DEEPSPEED_PATH"])
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    deepspeed.init_distributed("gloo")
    groups.mpu = SimpleNamespace(get_sequence_parallel_rank=lambda: team.rank)

    class Local(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            heads = (x_BSND.transpose(1, 2) for x_BSND in (q, k, v))
            return core(*heads, layout=AttentionLayout(None), tokens=None).transpose(1, 2).contiguous()

    made: nn.Module = DistributedAttention(Local(), team.group, scatter_idx=2, gather_idx=1)
    return made


def block_of(shape: Shape) -> Block:
    """Return the same layer on every rank, in float64 if there are few tokens."""
    torch.manual_seed(3)
    hidden = shape.queries * shape.head_dim
    config = ModelConfig(
        layers=1, hidden=hidden, ffn_hidden=1, heads=shape.queries, kv_heads=shape.keys, head_dim=shape.head_dim,
        vocab=2, position="none",
    )  # fmt: skip
    block = Block(config, 0)
    return block.double() if shape.length < 100 else block


def whole(shape: Shape, seed: int = 0) -> torch.Tensor:
    """Return the hidden state of all tokens, with the same values on every rank."""
    numbers = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if shape.length < 100 else torch.float32
    return torch.randn(shape.batch, shape.length, shape.queries * shape.head_dim, generator=numbers, dtype=dtype)


def main(job_path: str, result_path: str) -> None:
    """Run a job and write this rank's record."""
    torch.set_num_threads(1)
    job = Job.read(Path(job_path))
    dist.init_process_group("gloo")
    dealt = shares(job.shape.length, job.ranks)
    # With sizes that a peer does not support, its ranks may wait for each other until the timeout.
    group = dist.new_group(timeout=timedelta(seconds=40))
    team = SequenceTeam(group, dist.get_rank(), dealt, (tuple(range(job.ranks)),))
    result: list[dict[str, Any]] = []
    sides = [Side(case.title, job, team) for case in job.cases]
    for side in sides:  # sockets connect and buffers are allocated here
        record: dict[str, Any] = {"waited_s": side.clock.waited_s, "apart": 0.0, "refused": ""}
        result.append(record)
        try:
            record["sent"] = side.sent_bytes()
            record["apart"] = 0.0 if job.rate_mbit else side.apart()
        except (AssertionError, RuntimeError) as error:  # sizes that DeepSpeed does not support
            record["refused"] = f"{type(error).__name__}: {error}"
    for turn in range(job.rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            side.step()
    for side, record in zip(sides, result, strict=True):
        record["steps"] = side.steps
    dist.barrier()
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
