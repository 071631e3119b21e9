"""A stage's parameters as one flat tensor that is sent between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from partool_runtime.torch_internals import foreach

_ALIGNED = 8
"""Offsets of parameters are multiples of this number of elements; kernels need 16 bytes, which are 8 bf16 elements."""


class Chunk:
    """Layout of a stage's parameters in its flat weights, and of trained parameters in its flat gradients.

    ``module`` may be on the meta device; only names, shapes and ``requires_grad`` are read, which are equal
    on all ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        self.trained = tuple(name for name, parameter in parameters.items() if parameter.requires_grad)
        self._weights = _Layout(parameters)
        self._gradients = _Layout({name: parameters[name] for name in self.trained})

    @property
    def weight_elements(self) -> int:
        """Length of the flat weights."""
        return self._weights.elements

    @property
    def gradient_elements(self) -> int:
        """Length of the flat gradients; 0 for a frozen stage."""
        return self._gradients.elements

    def weights(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the parameters in flat weights, by name."""
        return self._weights.views(flat)

    def gradients(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the trained parameters' gradients in flat gradients, by name."""
        return self._gradients.views(flat)

    def leaves(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters in flat weights as leaves of a new autograd graph."""
        views = self.weights(flat)
        return {name: view.detach().requires_grad_(name in self.trained) for name, view in views.items()}

    def pack(self, module: nn.Module, flat: torch.Tensor) -> None:
        """Copy a module's parameters into flat weights, cast to the flat weights' type."""
        with torch.no_grad():
            foreach.copy_(list(self.weights(flat).values()), [p.detach() for p in module.parameters()])

    def collect(self, leaves: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        """Move the leaves' gradients into ``flat``, cast to the type of ``flat``; a missing gradient becomes zeros."""
        views = self.gradients(flat)
        given = [name for name in self.trained if leaves[name].grad is not None]
        with torch.no_grad():
            if given:
                foreach.copy_([views[name] for name in given], [_gradient(leaves[name]) for name in given])
            for name in self.trained:
                if leaves[name].grad is None:
                    views[name].zero_()
                leaves[name].grad = None


class _Layout:
    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        ends = list(accumulate(_rounded(parameter.numel()) for parameter in parameters.values()))
        self._starts: Sequence[int] = [0, *ends[:-1]]
        self.elements = ends[-1] if ends else 0

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: flat[start : start + _elements(shape)].view(shape)
            for (name, shape), start in zip(self._shapes.items(), self._starts, strict=False)
        }


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _elements(shape: Iterable[int]) -> int:
    return torch.Size(shape).numel()


def _rounded(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED
