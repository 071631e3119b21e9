"""Computation of one stage on one micro-batch, with weights that are passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn
from torch.func import functional_call

from partool.schedule import Action
from partool_runtime import deferral
from partool_runtime.data.batches import MicroBatch, on_device
from partool_runtime.parallel.weipipe.chunks import Chunk

Leaves = Mapping[str, torch.Tensor]


class RingModel(Protocol):
    """Model of a ring: every rank holds the outer modules and the parameters of its own stages."""

    @property
    def first(self) -> nn.Module:
        """Module that maps tokens ``[B, S]``, and if needed their documents ``[B, S]``, to ``[B, S, H]``."""

    @property
    def stages(self) -> Sequence[nn.Module]:
        """Modules that map ``[B, S, H]`` (and documents) to ``[B, S, H]``; other ranks' modules may be on meta."""

    @property
    def last(self) -> nn.Module:
        """Module that maps ``(x_BSH, labels_BS)`` to the sum of token losses. May share parameters with ``first``."""


class PendingBackward(NamedTuple):
    """A stage's forward pass whose backward pass comes next."""

    x_BSH: torch.Tensor | None  # noqa: N815
    """The stage's input, a leaf; None on the first stage, whose graph includes the embedding."""
    leaves: Leaves
    out: torch.Tensor


class PutOff(NamedTuple):
    """The deferred weight gradients of a split backward pass."""

    leaves: Leaves
    work: list[deferral.Work]


class Computation:
    """Computes the micro-batches of one rank in one step, in the type of computation.

    A forward pass keeps only the stages' inputs, and the backward pass recomputes the other tensors. If the backward
    pass follows immediately, the forward pass keeps all tensors.
    """

    def __init__(self, model: RingModel, chunks: Sequence[Chunk], dtype: torch.dtype, trained_from: int) -> None:
        self._first, self._stages, self._last = model.first, model.stages, model.last
        self._chunks, self._dtype, self._trained_from = chunks, dtype, trained_from
        self._top = len(chunks) - 1
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._graphs: dict[tuple[int, int], PendingBackward] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        """Output gradients of the stage whose backward pass is next, by micro-batch."""
        self._put_off: dict[tuple[int, int], PutOff] = {}
        self._live: set[tuple[int, int]] = set()
        self.peak_live = 0
        """Maximum number of (stage, micro-batch) pairs that wait for a backward pass at once, in this step."""
        self._batches: Sequence[MicroBatch] = ()
        self._weight = torch.ones(())
        self.loss_sum = torch.zeros(())

    def begin(self, batches: Sequence[MicroBatch], weight: torch.Tensor) -> None:
        """Start a step, which computes the gradients of ``weight`` times the sum of the losses."""
        self._batches, self._weight, self.peak_live = batches, weight, 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=weight.device)

    def forward(self, action: Action, flat: torch.Tensor, *, keeps: bool = False, halved: bool = False) -> None:
        """Run a stage's forward pass; ``keeps`` keeps its graph, ``halved`` prepares a split backward pass."""
        _, stage, batch = action
        if stage >= self._trained_from:
            self._live.add((stage, batch))
            self.peak_live = max(self.peak_live, len(self._live))
        if keeps:
            self._graphs[stage, batch] = graph = self._graph(stage, batch, flat, halved)
            self._hand_on(stage, batch, graph.out.detach())
            return
        with torch.no_grad():
            x_BSH = self._input(stage, batch)
            weights = dict(self._chunks[stage].weights(flat))
            out = functional_call(self._stages[stage], weights, (x_BSH, *self._documents(batch)))
            if stage == self._top:
                out = self._loss(out, batch)
        if stage < self._trained_from:
            self._inputs.pop((stage, batch), None)
        self._hand_on(stage, batch, out)

    def backward(self, action: Action, flat: torch.Tensor) -> None:
        """Run a stage's backward pass; :meth:`weights` then completes and collects the weight gradients."""
        _, stage, batch = action
        halved = action.kind == "I"
        graph = self._graphs.pop((stage, batch), None) or self._graph(stage, batch, flat, halved)
        self._inputs.pop((stage, batch), None)
        work: list[deferral.Work] = []
        given = self._weight.to(graph.out.dtype) if stage == self._top else self._gradients.pop(batch)
        with deferral.collecting(work) if halved else nullcontext():
            torch.autograd.backward([graph.out], [given])
        if graph.x_BSH is not None and graph.x_BSH.grad is not None:
            self._gradients[batch] = graph.x_BSH.grad
        self._put_off[stage, batch] = PutOff(graph.leaves, work)

    def weights(self, action: Action, into: torch.Tensor | None) -> None:
        """Compute deferred weight gradients; if ``into`` is given, write the pass's weight gradients there."""
        self._live.remove((action.stage, action.micro_batch))
        leaves, work = self._put_off.pop((action.stage, action.micro_batch))
        for job in work:
            job()
        if into is not None:
            self._chunks[action.stage].collect(leaves, into)

    def _graph(self, stage: int, batch: int, flat: torch.Tensor, halved: bool) -> PendingBackward:
        leaves = self._chunks[stage].leaves(flat)
        splitting: AbstractContextManager[None] = deferral.splitting() if halved else nullcontext()
        with torch.enable_grad(), splitting:
            x_BSH = self._input(stage, batch)
            if stage:
                x_BSH = x_BSH.detach().requires_grad_(stage > self._trained_from)
            out = functional_call(self._stages[stage], dict(leaves), (x_BSH, *self._documents(batch)))
            if stage == self._top:
                out = self._loss(out, batch)
        return PendingBackward(x_BSH if stage else None, leaves, out)

    def _input(self, stage: int, batch: int) -> torch.Tensor:
        if stage:
            return self._inputs[stage, batch]
        tokens_BS = self._batches[batch].tokens_BS.to(self.loss_sum.device, non_blocking=True)
        return self._call(self._first, tokens_BS, *self._documents(batch))

    def _documents(self, batch: int) -> tuple[torch.Tensor, ...]:
        return on_device(self._batches[batch].documents_BL, self.loss_sum.device)

    def _loss(self, x_BSH: torch.Tensor, batch: int) -> torch.Tensor:
        labels_BS = self._batches[batch].labels_BS.to(self.loss_sum.device, non_blocking=True)
        return self._call(self._last, x_BSH, labels_BS)

    def _call(self, module: nn.Module, *arguments: torch.Tensor) -> torch.Tensor:
        """Call an outer module with parameters cast to the type of computation; gradients keep the parameters' type."""
        narrowed = {name: p.to(self._dtype) for name, p in module.named_parameters() if p.dtype != self._dtype}
        return cast(torch.Tensor, functional_call(module, narrowed, arguments) if narrowed else module(*arguments))

    def _hand_on(self, stage: int, batch: int, out: torch.Tensor) -> None:
        if stage == self._top:
            self.loss_sum += out
        else:
            self._inputs[stage + 1, batch] = out
