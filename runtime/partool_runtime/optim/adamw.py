"""AdamW on this rank's shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from partool.spec.training import OptimizerSpec
from partool_kernels.adamw.op import Tensors, Update, adamw, takes
from partool_runtime.optim.grad_norm import LocalSums, Mode, local_sums
from partool_runtime.torch_internals import fused_adamw, local


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), algorithm 2.

    Parameters without a gradient in a step are taken to have a gradient of zero: their moments decay, so a step does
    not depend on how the model is spread. Moments have the type and the placement of their parameter.

    ``copies`` names parameters that another rank holds too, with the same gradient: both make the same update. A
    parameter may be a tensor rank's part of a larger one, which has as many dimensions: these decide on the decay.
    ``kernels`` is the mode of partool's own kernel, which makes a step in one launch on GPUs where parameters and
    moments are float32; elsewhere, and unless told, torch's fused one does.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimizerSpec,
        copies: Collection[str] = (),
        *,
        kernels: str = "torch",
    ) -> None:
        self._parameters = dict(parameters)
        self._copies = frozenset(copies)
        self._kernels = kernels
        self._betas = (spec.betas[0], spec.betas[1])
        self._eps = spec.eps
        self._decays = {True: spec.weight_decay, False: 0.0}
        with torch.no_grad():
            self._exp_avg = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
            self._exp_avg_sq = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
        self._device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        # A rank may hold no row of a parameter.
        held = [name for name, p in parameters.items() if local(p).numel() > 0]
        self._matrices = [name for name in held if parameters[name].ndim >= 2]
        self._vectors = [name for name in held if parameters[name].ndim < 2]
        self.updates = 0
        """Steps made, skipped ones not counted; checkpoints hold it."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the moments as ``exp_avg.<parameter>`` and ``exp_avg_sq.<parameter>``, the live tensors."""
        state = {f"exp_avg.{name}": tensor for name, tensor in self._exp_avg.items()}
        return state | {f"exp_avg_sq.{name}": tensor for name, tensor in self._exp_avg_sq.items()}

    def gradients(self, *, copies: bool = True) -> list[torch.Tensor]:
        """Return this rank's shards of all gradients, empty ones left out; copies only where they are asked for."""
        grads = (p.grad for name, p in self._parameters.items() if copies or name not in self._copies)
        return [shard for grad in grads if grad is not None and (shard := local(grad)).numel() > 0]

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def begin(self, lr: float, scale: float) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        self.clear_gradients()

    def sums(self, mode: Mode) -> LocalSums:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        return local_sums(self.gradients(copies=False), self._device, mode)

    def skip(self) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`: nothing was done yet."""

    def masters(self) -> dict[str, torch.Tensor]:
        """See :class:`partool_runtime.optim.types.Optimizer`: they are the parameters."""
        return {}

    def settle(self) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`: they always are."""

    def loaded(self) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`: they are the live tensors."""

    def close(self) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`."""

    @torch.no_grad()
    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update with gradients times ``scale``, which may scale the gradients in place."""
        self.updates += 1
        if self._kernels != "torch" and self._in_one_launch(lr, scale):
            return
        if scale != 1.0 and (gradients := self.gradients()):
            torch._foreach_mul_(gradients, scale)
        for names, decays in ((self._matrices, True), (self._vectors, False)):
            if names:
                self._update(names, lr, self._decays[decays])

    def _in_one_launch(self, lr: float, scale: float) -> bool:
        """Let partool's kernel make the step, and tell whether it could."""
        names = self._matrices + self._vectors
        tensors = Tensors(
            [local(self._parameters[name]) for name in names],
            [_gradient(self._parameters[name]) for name in names],
            [local(self._exp_avg[name]) for name in names],
            [local(self._exp_avg_sq[name]) for name in names],
            [True] * len(self._matrices) + [False] * len(self._vectors),
        )
        if not takes(tensors, self._kernels):
            return False
        update = Update(lr, *self._betas, self._eps, self._decays[True], scale, self.updates)
        adamw(tensors, update, self._kernels)
        return True

    def _update(self, names: list[str], lr: float, weight_decay: float) -> None:
        weights = [local(self._parameters[name]) for name in names]
        gradients = [_gradient(self._parameters[name]) for name in names]
        # Filled on the device: a copy from the host would wait for all work before it.
        count = torch.full((), float(self.updates), dtype=torch.float32, device=weights[0].device)
        fused_adamw(
            weights,
            gradients,
            [local(self._exp_avg[name]) for name in names],
            [local(self._exp_avg_sq[name]) for name in names],
            count,
            lr=lr,
            betas=self._betas,
            weight_decay=weight_decay,
            eps=self._eps,
        )


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(local(parameter))
    return local(parameter.grad)
