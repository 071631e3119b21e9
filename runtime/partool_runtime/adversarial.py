"""Adversarial training on perturbed embeddings (``training.adversarial``; docs/guide/adversarial.md).

From step ``start_step`` on, each micro-batch runs twice. The first pass finds the perturbation: a random one takes one
step in which the loss grows. No parameter requires gradients in this pass, so its backward pass computes no gradients
of weights, and nothing is reduced. The second pass is that of plain training, on embeddings plus the perturbation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from partool.layout.sequence import index
from partool.plan.types import Plan
from partool_runtime.data.batches import MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.model import HfDecoder
from partool_runtime.mesh import Ranks
from partool_runtime.model import Decoder
from partool_runtime.model.perturbation import ascended, drawn, first_values, working_dtype
from partool_runtime.parallel.grad_sync import GradSync
from partool_runtime.parallel.passes import Timer
from partool_runtime.torch_internals.fsdp import without_parameter_gradients


class Perturbed:
    """Finds the perturbation of a micro-batch, and adds it to the embeddings in the next forward pass."""

    def __init__(self, model: Decoder | HfDecoder, sync: GradSync, plan: Plan, ranks: Ranks) -> None:
        """Call it within the ranks' context of tensors, when the model is complete."""
        self._model, self._sync, self._device = model, sync, ranks.device
        self._spec, self._seed = plan.training.adversarial, plan.training.seed
        self._first_sequence = self._spec.start_step * plan.training.global_batch
        self._positions_S = torch.tensor(positions(plan, ranks), dtype=torch.int64, device=ranks.device)
        self._sequences_B: torch.Tensor | None = None
        """Sequences whose perturbation is to be drawn in the forward pass that runs."""
        self._perturbation_BSH: torch.Tensor | None = None
        model.embed.register_forward_hook(self._add)

    def find(
        self, micro: MicroBatch, loss_of: Callable[[MicroBatch], torch.Tensor], weight: torch.Tensor, timer: Timer
    ) -> None:
        """Find the perturbation of a micro-batch; its next forward pass must follow.

        ``loss_of`` runs a forward pass and returns the sum of token losses, whose gradient is scaled by ``weight`` as
        in training. Before ``start_step`` nothing happens.
        """
        if micro.first < self._first_sequence:
            return
        self._sync.before_ascent()
        with without_parameter_gradients(self._model), same_random_numbers(self._device, draws=self._model.draws):
            with timer("forward"):
                count = len(micro.tokens_BS)
                self._sequences_B = torch.arange(micro.first, micro.first + count, device=self._device)
                loss = loss_of(micro)
            with timer("backward"):
                before_BSH = self._perturbation_BSH
                assert before_BSH is not None, "the forward pass looks up embeddings"
                (gradient_BSH,) = torch.autograd.grad(loss * weight.to(loss.dtype), before_BSH)
                self._perturbation_BSH = ascended(self._spec, before_BSH.detach(), gradient_BSH)

    def _add(self, embed: nn.Module, args: tuple[torch.Tensor, ...], x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the embeddings with a new perturbation, with the one that was found before, or as they are."""
        if self._sequences_B is not None:
            sequences_B, self._sequences_B = self._sequences_B, None
            # Nothing before the perturbation takes part in the backward pass.
            x_BSH = x_BSH.detach()
            found_BSH = self._drawn(sequences_B, x_BSH).requires_grad_()
            self._perturbation_BSH = found_BSH
        elif self._perturbation_BSH is not None:
            found_BSH, self._perturbation_BSH = self._perturbation_BSH, None
        else:
            return x_BSH
        # Both have the wider type as they are added: the perturbation may be smaller than a narrow type's steps.
        return (x_BSH + found_BSH).to(x_BSH.dtype)

    def _drawn(self, sequences_B: torch.Tensor, x_BSH: torch.Tensor) -> torch.Tensor:
        dtype = working_dtype(x_BSH.dtype)
        return first_values(self._spec, drawn(self._seed, sequences_B, self._positions_S, x_BSH.shape[2], dtype))


def check_perturbable(plan: Plan) -> None:
    """Raise ConfigurationError PT498 if embeddings cannot be perturbed in a plan's layout, or in its model."""
    layout = plan.layout
    parts = ("a pipeline" * (layout.mesh.pp > 1), "two-dimensional tensor parallelism" * (layout.tensor.inner > 1))
    if what := next(filter(None, (*parts, "layers of experts" * (plan.model.moe is not None))), ""):
        message = f"training.adversarial perturbs embeddings, which does not run with {what}"
        raise ConfigurationError("PT498", message, "Plan it again.")


def positions(plan: Plan, ranks: Ranks) -> tuple[int, ...]:
    """Return the positions in their sequence of the tokens whose embeddings a rank holds, in order.

    Padding of the last tensor rank's share has position -1.
    """
    local = tuple(index(plan.shares[ranks.cp.place]))
    if ranks.tp.size == 1 or not plan.layout.tensor.sequence_norms:
        return local
    share = -(-len(local) // ranks.tp.size)
    mine = local[ranks.tp.place * share : (ranks.tp.place + 1) * share]
    return mine + (-1,) * (share - len(mine))


@contextmanager
def same_random_numbers(device: torch.device, *, draws: bool) -> Iterator[None]:
    """Afterwards let torch draw the same random numbers again as within; without ``draws`` nothing is drawn."""
    if not draws:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        yield
