"""Optimizer states that stay on the device while other states are in host memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from partool_kernels.host import Part, Pool, StepRule, UpdatePass, accumulate, reference, sums, update
from partool_kernels.host.types import Mode
from partool_runtime.offload.lanes import Lanes, Mark
from partool_runtime.offload.passes import WeightsTarget
from partool_runtime.torch_internals.tensors import fused_adamw


def tail(shards: Sequence[tuple[str, int]], fraction: float) -> frozenset[str]:
    """Return the names of the ``shards`` (name, number of elements) whose states stay on the device.

    Shards are given in the order in which their gradients are expected. The states of the last shards stay: in host
    memory they would delay the end of the step by a copy to the host, a pass, and a copy back. Only whole shards stay,
    in total as close to ``fraction`` of all elements as possible. A shard that would increase the difference, such as
    an embedding, is skipped.
    """
    wanted, chosen_elements, names = fraction * sum(elements for _, elements in shards), 0, []
    for name, elements in reversed(shards):
        if chosen_elements + elements / 2 <= wanted:
            chosen_elements += elements
            names.append(name)
    return frozenset(names) if fraction > 0 else frozenset()


def share_note(shards: Sequence[tuple[str, int]], staying: Collection[str], fraction: float) -> tuple[str, ...]:
    """Return a note if the share of states on the device differs from ``fraction`` by more than ``fraction`` / 2."""
    total = sum(elements for _, elements in shards)
    kept = sum(elements for name, elements in shards if name in staying) / max(1, total)
    if total == 0 or abs(kept - fraction) <= fraction / 2:
        return ()
    return (f"{kept:.1%} of the optimizer's state stays on the device, not {fraction:.1%}: only whole parameters do",)


class Resident:
    """Masters and moments of some shards on the device, updated once the gradient check's scale or skip is known.

    On a CPU the update is the pass that also updates states in host memory, so it gives the same bits. On other devices
    AdamW uses torch's fused kernel, and other optimizers use torch's elementwise operations.
    """

    def __init__(
        self,
        targets: Mapping[str, WeightsTarget],
        dtypes: Sequence[torch.dtype],
        *,
        lanes: Lanes,
        pool: Pool,
        accumulates: bool,
        mode: Mode = "auto",
    ) -> None:
        self._targets, self._lanes, self._pool = dict(targets), lanes, pool
        self._accumulates, self._mode = accumulates, mode
        self._states = {
            name: tuple(torch.zeros_like(target.weights, dtype=dtype) for dtype in dtypes)
            for name, target in targets.items()
        }
        self._gradients: dict[str, torch.Tensor] = {}
        self._mark: Mark | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def state(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the live tensors of a shard's master and moments, flat."""
        return self._states[name]

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Gradients held until their step's scale or skip decision is known, by shard."""
        return self._gradients

    def begin(self) -> None:
        """Drop all gradients."""
        self._gradients.clear()

    @torch.no_grad()
    def arrive(self, name: str, gradient: torch.Tensor) -> None:
        """Take a flat gradient, which the caller must not change any more."""
        if not self._accumulates:
            self._gradients[name] = gradient
        elif (total := self._gradients.get(name)) is None:
            self._gradients[name] = gradient.to(self._states[name][0].dtype, copy=True)
        else:
            self._add(total, gradient)
        self._mark = self._lanes.now()

    def sums(self, leaving_out: Collection[str] = ()) -> tuple[list[float], bool]:
        """Wait for the device; return the sums of squares of the gradients, and whether all gradients are finite."""
        if self._mark is not None:
            self._mark.before_compute()
        grads = [grad for name, grad in self._gradients.items() if name not in leaving_out]
        on_host = [grad for grad in grads if grad.device.type == "cpu"]
        host_sums = sums(on_host, pool=self._pool, mode=self._mode)
        blocks, finite = [block for part in host_sums.squares for block in part], all(host_sums.finite)
        elsewhere = [grad for grad in grads if grad.device.type != "cpu"]
        if elsewhere:
            wide = [torch.promote_types(grad.dtype, torch.float32) for grad in elsewhere]
            norms = [torch.linalg.vector_norm(g, dtype=dtype) for g, dtype in zip(elsewhere, wide, strict=True)]
            squares = torch.stack(norms).double().square().tolist()
            blocks, finite = blocks + squares, finite and all(map(math.isfinite, squares))
        return blocks, finite

    @torch.no_grad()
    def settle(self, rules: Sequence[StepRule] | None) -> None:
        """End the step: update by ``rules``, or skip the step if ``rules`` is None."""
        if rules is not None:
            for name, target in self._targets.items():
                gradient = self._gradients.pop(name, None)
                if gradient is None:
                    gradient = torch.zeros_like(self._states[name][0])
                elif gradient.device.type != "cpu":
                    # Gradients are made on the stream of the reductions and read on the stream of compute.
                    gradient.record_stream(torch.accelerator.current_stream(gradient.device))
                self._step(target, self._states[name], gradient, rules)
        self._gradients.clear()

    @torch.no_grad()
    def rebuild(self) -> None:
        """Write all weights from the masters."""
        for name, target in self._targets.items():
            target.weights.copy_(self._states[name][0])

    def _add(self, total: torch.Tensor, gradient: torch.Tensor) -> None:
        if total.device.type == "cpu":
            accumulate([total], [gradient], first=False, pool=self._pool, mode=self._mode)
        else:
            total.add_(gradient)

    def _step(
        self, target: WeightsTarget, state: tuple[torch.Tensor, ...], gradient: torch.Tensor, rules: Sequence[StepRule]
    ) -> None:
        master, *moments = state
        part, taken = Part(master, tuple(moments), target.group), UpdatePass([gradient], rules)
        rule = rules[target.group]
        if master.device.type == "cpu":
            update([part], step=taken, weights=[target.weights], pool=self._pool, mode=self._mode)
        elif rule.kind == "adamw" and all(moment.dtype == master.dtype for moment in moments):
            _fused(part, gradient, rule)
            target.weights.copy_(master)
        else:
            weights = [target.weights]
            reference.update([part], None, taken, keep=True, weights=weights, wants_sums=False)


def _fused(part: Part, gradient: torch.Tensor, rule: StepRule) -> None:
    # The step count is filled on the device: a copy from the host would wait for all earlier work.
    count = torch.full((), float(rule.step), dtype=torch.float32, device=part.master.device)
    fused_adamw(
        [part.master],
        [gradient.to(part.master.dtype).mul(rule.scale)],
        [part.moments[0]],
        [part.moments[1]],
        count,
        lr=rule.lr,
        betas=(rule.beta1, rule.beta2),
        weight_decay=rule.weight_decay,
        eps=rule.eps,
    )
