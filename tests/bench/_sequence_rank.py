"""One rank of a measurement: ``python _sequence_rank.py JOB RESULT``, with torch's RANK, WORLD_SIZE, MASTER_* set.

All methods are set up first and then run in turn, round after round. A step is one attention layer, or two along the
axes of a grid, forward and backward; it starts on all ranks at an agreed time of the machine's clock and ends when its
last rank is through. With rates given, scores and values are not computed: the rank waits as long as they would take,
while real tensors are sent. Without rates, everything is computed, and results and gradients are compared with those of
one process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from _pipeline_net import sent_bytes
from _sequence_job import Case, Job, Shape
from gather_peak import allocated_bytes

sys.path.append(str(Path(__file__).parents[1]))
from layouts import new_layout
from torch import nn

from partool.plan.layout import Mesh
from partool.spec.model import ModelConfig
from partool_runtime.model import AttentionLayout, Block, kernels
from partool_runtime.model.attention import Context, SelfAttention, Tokens
from partool_runtime.model.kernels import Sight
from partool_runtime.parallel.sequence.dsp import row_positions
from partool_runtime.parallel.sequence.types import SequenceTeam, method_named

START_IN_S = 0.004
"""Seconds between the agreement on a start time and the start."""


class Clock:
    """Waits for as long as work would take, and sums the waits."""

    def __init__(self, flops_per_s: tuple[float, float]) -> None:
        self.forward_rate, self.backward_rate = flops_per_s
        self.waited_s = 0.0

    def wait(self, flops: float, rate: float) -> None:
        """Wait for as long as the given number of operations takes."""
        self.waited_s += flops / rate
        time.sleep(flops / rate)


def pairs(sight: Sight, queries: int, keys: int) -> float:
    """Return the number of unmasked query-key pairs per sequence."""
    if sight.causal:
        return queries * (queries + 1) / 2
    if sight.mask is None:
        return float(queries * keys)
    return float(sight.mask.sum()) / (sight.mask.shape[0] if sight.mask.dim() == 4 else 1)


def seen(length: int, window: int | None) -> float:
    """Return the number of unmasked query-key pairs of a whole causal sequence."""
    narrow = min(window or length, length)
    return narrow * (narrow + 1) / 2 + (length - narrow) * narrow


def wait_in_kernels(clock: Clock) -> None:
    """Replace the kernels that methods call by waits that compute nothing."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, rows, width = q.shape
        clock.wait(4.0 * batch * heads * width * pairs(sight, rows, k.shape[2]), clock.forward_rate)
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(
        grad: torch.Tensor, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], sight: Sight
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = inputs
        batch, heads, rows, width = q.shape
        clock.wait(10.0 * batch * heads * width * pairs(sight, rows, k.shape[2]), clock.backward_rate)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    replaced: Any = kernels
    replaced.forward, replaced.backward = forward, backward


class _Waiting(torch.autograd.Function):
    """Attention of whole sequences that waits instead of computing."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, each: float, clock: Clock) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.flops, ctx.clock = each * q.shape[0] * q.shape[1] * q.shape[3], clock
        clock.wait(4.0 * ctx.flops, clock.forward_rate)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        ctx.clock.wait(10.0 * ctx.flops, ctx.clock.backward_rate)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None


class Part(nn.Module):
    """Stand-in for a projection: passes on some of the columns."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = torch.empty(width, hidden, device="meta")
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : self.width].clone()


class Nothing(nn.Module):
    """Stand-in for the feed-forward network."""

    def forward(self, x: torch.Tensor) -> float:
        return 0.0


class Runner:
    """A method on this rank."""

    def __init__(self, case: Case, job: Job, teams: tuple[tuple[int, ...], ...]) -> None:
        shape, rank = job.shape, dist.get_rank()
        self.case, self.job, self.steps, self.apart = case, job, [], 0.0  # type: ignore[var-annotated]
        self.clock = Clock(job.flops_per_s)
        shares = case.shares(shape, job.ranks)
        self.team = SequenceTeam(dist.new_group(), rank, shares, teams)
        self.blocks = blocks_of(shape)
        for block in self.blocks if job.rate_mbit else ():
            block.attention.core = self._wait
        mesh = Mesh(cp=job.ranks)
        layout = new_layout(
            mesh=mesh, zero=0, micro_batch=1, accumulation=1, recompute=("none",), compile="none",
            stages=((0, len(self.blocks)),),
            sequence_method=case.method, sequence_order=case.order, sequence_inner=case.inner,
            sequence_teams=case.teams, sequence_inside=case.inside,
        )  # fmt: skip
        method_named(layout.sequence.method)(self.blocks, self.team, layout)
        self.index = torch.tensor(self.team.index(rank))
        self.context = Context(None, Tokens(shape.length, self.index, None, shape.grid))
        if shape.grid:
            held = torch.tensor(row_positions(self.team, shape.grid))
            self.context.along_rows = Context(None, Tokens(shape.length, held, None, shape.grid))
        self.x = whole(shape)[:, self.index].clone().requires_grad_()
        self.grad = whole(shape, seed=1)[:, self.index].clone()

    def _wait(self, q: Any, k: Any, v: Any, layout: AttentionLayout, tokens: Tokens | None) -> torch.Tensor:
        each = seen(q.shape[2], layout.window)
        if layout.axis is not None and self.job.shape.grid:
            line = self.job.shape.grid[layout.axis == "row"]
            each = q.shape[2] // line * seen(line, None)
        out: torch.Tensor = _Waiting.apply(q, k, v, each, self.clock)  # type: ignore[no-untyped-call]
        return out

    def step(self) -> None:
        """Run one step with the others and note when it ended."""
        self.x.grad, self.clock.waited_s = None, 0.0
        if self.job.rate_mbit:
            wait_in_kernels(self.clock)
        sent = sent_bytes() if self.job.rate_mbit else 0
        start = _start_together()
        out = self._pass()
        stop = time.perf_counter()
        dist.barrier()  # the last messages may still be in flight
        found = {"start_s": start, "stop_s": stop}
        if self.job.rate_mbit:
            found["sent_bytes"] = sent_bytes() - sent
        self.steps.append(found)
        if not self.job.rate_mbit and not self.job.memory:
            self.apart = self._apart(out)

    def _pass(self) -> torch.Tensor:
        out = self.x
        for block in self.blocks:
            # The exchanges that transpose the hidden state wrap whole layers.
            out = block(out, self.context) if self.job.shape.grid else block.attention(out, self.context)
        out.backward(self.grad)
        return out

    def peak_bytes(self) -> int:
        """Return torch's peak allocation in a step, on this thread."""
        self.x.grad = None
        return allocated_bytes(self._pass)

    def _apart(self, out: torch.Tensor) -> float:
        """Return the largest difference of results and gradients from those of one process."""
        shape = self.job.shape
        x = whole(shape).requires_grad_()
        expected = x
        for block in blocks_of(shape):
            attended = _dense(block.attention, expected, shape)
            expected = expected + attended if shape.grid else attended
        expected.backward(whole(self.job.shape, seed=1))
        assert x.grad is not None
        assert self.x.grad is not None
        both = ((out, expected), (self.x.grad, x.grad))
        return max(float((a - b[:, self.index]).abs().max() / b.abs().max()) for a, b in both)


def _dense(attention: SelfAttention, x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return attention computed with an explicit mask."""
    places, axis = torch.arange(shape.length), attention.layout.axis
    distance = places[:, None] - places[None]
    mask = (distance >= 0) & (distance < (shape.window or shape.length))
    if axis is not None and shape.grid:
        line = places // shape.grid[1] if axis == "row" else places % shape.grid[1]
        mask &= line[:, None] == line[None]
    q, k, v = (
        part(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for part in (attention.q, attention.k, attention.v)
    )
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], 1) for heads in (k, v))
    scores = (q @ k.mT / attention.head_dim**0.5).masked_fill(~mask, -torch.inf)
    out: torch.Tensor = attention.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    return out


def blocks_of(shape: Shape) -> list[Block]:
    """Return attention-only layers, whose projections pass on columns."""
    hidden, keys = shape.queries * shape.head_dim, shape.keys * shape.head_dim
    config = ModelConfig(
        layers=len(shape.kinds), hidden=hidden, ffn_hidden=1, heads=shape.queries, kv_heads=shape.keys,
        head_dim=shape.head_dim, vocab=2, position="none", window=shape.window, grid=shape.grid,
        layer_types=shape.kinds,
    )  # type: ignore[arg-type]  # fmt: skip
    with torch.device("meta"):
        found = [Block(config, layer) for layer in range(config.layers)]
    for block in found:
        attention = cast(Any, block.attention)
        del attention.q, attention.k, attention.v, attention.o
        attention.q, attention.k, attention.v = Part(hidden, hidden), Part(keys, hidden), Part(keys, hidden)
        attention.o = Part(hidden, hidden)
        block.attention_norm, block.ffn_norm, block.ffn = nn.Identity(), nn.Identity(), Nothing()  # type: ignore[assignment]
    return found


def whole(shape: Shape, seed: int = 0) -> torch.Tensor:
    """Return the hidden state of all tokens, with the same values on every rank; float64 for small sizes."""
    numbers = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if shape.length < 100 else torch.float32
    return torch.randn(shape.batch, shape.length, shape.queries * shape.head_dim, generator=numbers, dtype=dtype)


def _start_together() -> float:
    """Wait for the other ranks; return the time on the machine's clock at which all of them start."""
    dist.barrier()
    start = torch.tensor([time.perf_counter() + START_IN_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    left = float(start) - time.perf_counter()
    if left > 0:
        time.sleep(left)
    return float(start)


def main(job_path: str, result_path: str) -> None:
    """Run a job and write this rank's record."""
    torch.set_num_threads(1)
    job = Job.read(Path(job_path))
    dist.init_process_group("gloo")
    teams = (tuple(range(job.ranks)),)
    runners = [Runner(case, job, teams) for case in job.cases]
    for runner in runners:  # sockets connect and buffers are allocated here
        runner.step()
        runner.steps.clear()
    for turn in range(job.rounds):
        for runner in runners if turn % 2 == 0 else reversed(runners):
            runner.step()
    peaks = [one.peak_bytes() if job.memory else 0 for one in runners]
    result = [
        {"steps": one.steps, "waited_s": one.clock.waited_s, "apart": one.apart, "peak_bytes": peak}
        for one, peak in zip(runners, peaks, strict=True)
    ]
    dist.barrier()
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
