"""Optimizer whose state is on the device of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from partool.layout.matrices import is_scaled
from partool.spec.training import OptimizerSpec
from partool.strategies.optimizers import OPTIMIZERS
from partool_kernels.adamw.op import Tensors, Update, adamw, takes
from partool_kernels.host import Part, Pool, StepRule, UpdatePass, update
from partool_runtime.optim.average import MovingAverage
from partool_runtime.optim.grad_norm import LocalSums, Mode, local_sums
from partool_runtime.optim.groups import ParameterGroup, grouped
from partool_runtime.optim.lamb import LambSteps
from partool_runtime.optim.muon import MatrixShard, WholeMatrices
from partool_runtime.optim.steps import Shards, step
from partool_runtime.optim.types import CountsUpdates
from partool_runtime.optim.whole_norms import WholeNorms, alone
from partool_runtime.torch_internals.tensors import local, local_bytes


class DeviceOptimizer(CountsUpdates):
    """Updates this rank's shards by the spec's optimizer; see :class:`partool_runtime.optim.types.Optimizer`.

    A parameter without a gradient in a step is treated as having a gradient of zero: its moments decay, so a step does
    not depend on how the model is sharded. Moments have the type and the placement of their parameter.

    ``copies`` names parameters that another rank holds, too, with the same gradient; both ranks make the same update. A
    parameter may be a tensor rank's part of a larger parameter. The part has as many dimensions as the larger
    parameter, and the number of dimensions decides whether it gets weight decay.

    ``kernels`` is the mode of partool's own kernels. On GPUs one of these kernels makes a step of adamw in one launch
    if parameters and moments are float32; the default is torch's fused kernel. On CPUs ``native`` is the compiled pass
    that offloaded states also use, so that steps have the same bits with and without offload; other modes use torch's
    operators. ``matrices`` makes the steps of parameters that the optimizer updates as whole matrices. ``norms``
    adds up norms of parameters of which other ranks hold parts; None means that this rank holds all of each.
    ``average`` is the average of the parameters, which belongs to the state and takes in each step.
    """

    term = "optimizer"
    """See ``Optimizer``."""
    notes: tuple[str, ...] = ()
    """See ``Optimizer``."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimizerSpec,
        copies: Collection[str] = (),
        *,
        kernels: str = "torch",
        matrices: WholeMatrices | None = None,
        norms: WholeNorms | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self.average = average
        self._parameters = dict(parameters)
        self._copies = frozenset(copies)
        self._kernels = kernels
        self._matrices = matrices
        matrix_names = frozenset() if matrices is None else matrices.names
        self._groups = grouped(spec, {name: p.ndim for name, p in parameters.items()}, matrix_names)
        self._moments = self._zeros()
        self._device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        self._pool: Pool | None = None
        self._sharded_names: list[list[str]] = [[] for _ in self._groups.groups]
        for name, parameter in parameters.items():
            if local(parameter).numel() > 0:  # a rank may hold no row of a parameter
                self._sharded_names[self._groups.of[name]].append(name)
        steps = {
            place: group
            for place, group in enumerate(self._groups.groups)
            if self._sharded_names[place] and not (OPTIMIZERS[group.kind].rest or OPTIMIZERS[group.kind].norms)
        }
        self._lamb: LambSteps | None = None
        if OPTIMIZERS[spec.name].norms:
            names = (name for of_group in self._sharded_names for name in of_group)
            scaled = [name for name in names if is_scaled(spec.adapt, parameters[name].ndim)]
            self._lamb = LambSteps(spec, self._groups, self._sharded_names, norms or alone(scaled, self._device))
        self._launches = _alike(steps)

    @torch.no_grad()
    def _zeros(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return zeros for each kind of moments, by name of the parameters that have it."""
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for kind, record in OPTIMIZERS.items():
            names = [name for name in self._parameters if self._groups.kind_of(name) == kind]
            for moment in record.moments if names else ():
                zeros = {name: torch.zeros_like(self._parameters[name], requires_grad=False) for name in names}
                moments.setdefault(moment, {}).update(zeros)
        return moments

    def state(self) -> dict[str, torch.Tensor]:
        """Return the live tensors of the moments by ``<kind>.<parameter>``, such as ``exp_avg.embed.weight``."""
        moments = {f"{kind}.{name}": tensor for kind, of in self._moments.items() for name, tensor in of.items()}
        return moments if self.average is None else moments | self.average.state()

    def gradients(self, *, copies: bool = True) -> list[torch.Tensor]:
        """Return this rank's non-empty shards of all gradients, with or without the parameters in ``copies``."""
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
        """See :class:`partool_runtime.optim.types.Optimizer`: no state has changed yet."""

    def masters(self) -> dict[str, torch.Tensor]:
        """See :class:`partool_runtime.optim.types.Optimizer`: empty, as the parameters themselves are the masters."""
        return {}

    def settle(self) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`: states are always current."""

    def loaded(self) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`: masters and state are the live tensors."""

    def state_bytes(self) -> int:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        return local_bytes(tensor for of in self._moments.values() for tensor in of.values())

    def gradient_bytes(self) -> int:
        """See :class:`partool_runtime.optim.types.Optimizer`: this optimizer holds no gradients."""
        return 0

    def held_bytes(self) -> dict[str, int]:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        return {}

    def report(self) -> dict[str, float]:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        return {}

    def close(self) -> None:
        """See :class:`partool_runtime.optim.types.Optimizer`."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @torch.no_grad()
    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update with gradients times ``scale``; the gradients may be scaled in place."""
        self.updates += 1
        self._update(lr, scale)
        if self.average is not None:
            self.average.update(self.updates)

    def _update(self, lr: float, scale: float) -> None:
        rules = self._groups.rules(lr, self.updates, scale)
        self._step_matrices(rules)
        if self._lamb is not None:
            self._lamb.step(self._shards, rules)
        kinds = {rules[place].kind for places in self._launches for place in places}
        if self._kernels == "native" and self._device.type == "cpu" and all(OPTIMIZERS[kind].host for kind in kinds):
            self._in_one_pass(rules)
            return
        for places in self._launches:
            if not self._in_one_launch(places, rules):
                for place in places:
                    step(self._shards(self._sharded_names[place]), rules[place])

    def _step_matrices(self, rules: list[StepRule]) -> None:
        """Update the parameters that are updated as whole matrices; every rank takes part, even without shards."""
        if self._matrices is None or not self._matrices.names:
            return
        (moment,) = OPTIMIZERS[self._groups.kind].moments
        matrix_names = [name for names in self._sharded_names for name in names if name in self._matrices.names]
        shards = {
            name: MatrixShard(
                local(self._parameters[name]),
                _gradient(self._parameters[name]),
                local(self._moments[moment][name]),
                rules[self._groups.of[name]],
            )
            for name in matrix_names
        }
        self._matrices.step(shards, local(self._parameters[min(self._matrices.names)]))

    def _in_one_pass(self, rules: list[StepRule]) -> None:
        """Update all parameters by the compiled pass that also updates states in host memory."""
        names = [(place, name) for places in self._launches for place in places for name in self._sharded_names[place]]
        if not names:
            return
        if self._pool is None:
            self._pool = Pool(torch.get_num_threads())
        shards = self._shards([name for _, name in names])
        parts = [
            Part(weight.view(-1), tuple(moment.view(-1) for moment in moments), place)
            for (place, _), weight, *moments in zip(names, shards.weights, *shards.moments, strict=True)
        ]
        gradients = [gradient.contiguous().view(-1) for gradient in shards.gradients]
        update(parts, step=UpdatePass(gradients, rules), pool=self._pool, mode="native")

    def _in_one_launch(self, places: tuple[int, ...], rules: list[StepRule]) -> bool:
        """Update groups that differ only in weight decay by partool's kernel; return False if the kernel cannot."""
        if self._kernels == "torch" or rules[places[0]].kind != "adamw":
            return False
        shards = self._shards([name for place in places for name in self._sharded_names[place]])
        decays = [rules[place].weight_decay != 0.0 for place in places for _ in self._sharded_names[place]]
        first, second = shards.moments
        tensors = Tensors(shards.weights, shards.gradients, first, second, decays)
        if not takes(tensors, self._kernels):
            return False
        rule = rules[places[0]]
        decay = max(rules[place].weight_decay for place in places)
        numbers = Update(rule.lr, rule.beta1, rule.beta2, rule.eps, decay, rule.scale, rule.step)
        adamw(tensors, numbers, self._kernels)
        return True

    def _shards(self, names: Iterable[str]) -> Shards:
        names = list(names)
        moments = OPTIMIZERS[self._groups.kind_of(names[0])].moments
        return Shards(
            [local(self._parameters[name]) for name in names],
            [_gradient(self._parameters[name]) for name in names],
            [[local(self._moments[moment][name]) for name in names] for moment in moments],
        )


def _alike(groups: Mapping[int, ParameterGroup]) -> list[tuple[int, ...]]:
    """Return lists of group indices; groups of a list differ only in weight decay, so one launch updates the list."""
    groups_by_decay: dict[ParameterGroup, dict[float, list[int]]] = {}
    for place, group in groups.items():
        groups_by_decay.setdefault(replace(group, weight_decay=0.0), {}).setdefault(group.weight_decay, []).append(
            place
        )
    launches = []
    for by_decay in groups_by_decay.values():
        without = by_decay.pop(0.0, [])
        for places in by_decay.values() or [[]]:
            launches.append((*places, *without))
            without = []
    return launches


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros_like(local(parameter))
    return local(parameter.grad)
