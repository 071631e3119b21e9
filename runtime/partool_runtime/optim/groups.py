"""Parameter groups with equal optimizer settings, from the spec and parameter names, and their rules for a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from partool.layout.parameters import group_of
from partool.spec.training import OptimizerGroup, OptimizerSpec
from partool.strategies.optimizers import OPTIMIZERS
from partool_kernels.host import StepRule


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Settings that some parameters share; see :class:`partool_kernels.host.StepRule`."""

    kind: str
    """Name of the optimizer of these parameters, a key of :data:`partool.strategies.optimizers.OPTIMIZERS`."""
    lr_factor: float
    beta1: float
    """First decay rate, or the momentum of an optimizer with the setting ``momentum``."""
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """All groups of a spec, equal and equally ordered on all ranks, and the group of each parameter."""

    kind: str
    """Name of the spec's optimizer."""
    groups: tuple[ParameterGroup, ...]
    of: Mapping[str, int]
    """Index in ``groups`` of each parameter's group, by the parameter's name; :meth:`rules` returns the rules in the
    order of ``groups``."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the kinds of moments of parameters that the spec's optimizer updates, as in checkpoints."""
        return OPTIMIZERS[self.kind].moments

    def kind_of(self, name: str) -> str:
        """Return the name of a parameter's optimizer, which for some is the one that updates no whole matrices."""
        return self.groups[self.of[name]].kind

    def rules(self, lr: float, step: int, scale: float) -> list[StepRule]:
        """Return each group's rule for a step: ``step`` counts from 1; gradients are multiplied by ``scale``."""
        return [
            StepRule(g.kind, lr * g.lr_factor, g.beta1, g.beta2, g.eps, g.weight_decay, step, scale)
            for g in self.groups
        ]


def grouped(spec: OptimizerSpec, dimensions: Mapping[str, int], matrix_names: Collection[str] = ()) -> ParameterGroups:
    """Return the parameter groups; ``dimensions`` maps each parameter's name to its number of dimensions.

    The settings of the first pattern that matches a name replace the optimizer's. By default, weights of two or more
    dimensions get weight decay, norms and biases do not. A rank's part of a parameter has as many dimensions as the
    whole. ``matrix_names`` are the parameters that an optimizer of whole matrices updates; its record names the
    optimizer of the others.
    """
    rest = OPTIMIZERS[spec.name].rest
    places: dict[ParameterGroup, int] = {}
    by_pattern = {
        (pattern, kind, matrix): places.setdefault(_group(spec, settings, kind, matrix=matrix), len(places))
        for pattern, settings in (*spec.groups.items(), (None, OptimizerGroup()))
        for kind in ((spec.name, rest) if rest else (spec.name,))
        for matrix in (True, False)
    }
    of = {
        name: by_pattern[
            group_of(name, spec.groups), rest if rest and name not in matrix_names else spec.name, count >= 2
        ]
        for name, count in dimensions.items()
    }
    return ParameterGroups(spec.name, tuple(places), of)


def _group(spec: OptimizerSpec, settings: OptimizerGroup, kind: str, *, matrix: bool) -> ParameterGroup:
    beta1, beta2 = spec.betas if settings.betas is None else settings.betas
    if "momentum" in OPTIMIZERS[kind].reads:
        beta1 = spec.momentum if settings.momentum is None else settings.momentum
    decay = (spec.weight_decay if matrix else 0.0) if settings.weight_decay is None else settings.weight_decay
    eps = spec.eps if settings.eps is None else settings.eps
    return ParameterGroup(kind, settings.lr_factor, beta1, beta2, eps, decay)
