"""A module of the user's own behind the interface of partool's decoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from partool.plan.types import ModuleModel
from partool.spec.model import ModelConfig
from partool_runtime.graph.capture import Captured, CaptureError, capture
from partool_runtime.hf.building import aliases
from partool_runtime.hf.model import HfPart, tie
from partool_runtime.hf.numerics import stay_wide
from partool_runtime.model.loss import loss_of_logits
from partool_runtime.usermodel.building import blocks_of, build_module, built_weights

if TYPE_CHECKING:
    from partool_runtime.weights.draw import BlockSource


class ModuleDecoder(HfPart):
    """A module that maps tokens ``[B, S]`` to logits ``[B, S, V]``; parameters have the module's own names.

    This decoder and the module share their parameters, buffers and children, so that a change of one is a change of
    both.
    """

    def __init__(self, module: ModuleModel, config: ModelConfig, seed: int) -> None:
        """Build the module with parameters on the meta device; its own first values are drawn from ``seed``."""
        super().__init__()
        root = build_module(module)
        self.__dict__["user_module"] = root  # no child: its parameters are those of this decoder
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = root.__dict__[table]
        self.config, self._module, self._seed = config, module, seed
        self.captured = False
        self.base_prefix, self.head_name, self.constants = "", "", {}
        self._blocks = blocks_of(root)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in root.named_parameters()}
        self.aliases, self.draws = aliases(root), True  # functions may draw numbers, which no module tells
        self._loss = cast(Any, loss_of_logits)
        for each in (root, *self.layers):
            stay_wide(each)

    @property
    def base(self) -> nn.Module:
        """The module itself."""
        return cast(nn.Module, self.__dict__["user_module"])

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, in order."""
        return cast(nn.ModuleList, self.base.get_submodule(self._blocks))

    @property
    def head_module(self) -> None:
        """None: logits come from the module's own code."""
        return

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield the layers with their numbers."""
        return enumerate(self.layers)

    def groups(self) -> list[list[nn.Module]]:
        """Return the units of sharding and gathering: each layer, then all else, which stays gathered in the root."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        rest = [module for module in self.modules() if id(module) not in inside and module._parameters]
        return [*([layer] for layer in self.layers), [module for module in rest if module is not self]]

    def to_empty(self, *, device: Any, recurse: bool = True) -> ModuleDecoder:
        """Allocate parameters like ``nn.Module.to_empty``; tied parameters stay tied."""
        super().to_empty(device=device, recurse=recurse)
        tie(self, self.aliases)
        return self

    def capture(self, *, dtype: torch.dtype, length: int, training: bool, documents: bool, batch: int) -> Captured:
        """Return the graph of the forward pass of ``length`` tokens; raises CaptureError."""
        if documents:
            raise CaptureError("it takes no positions, which start anew in each document")
        return capture_module(self.base, dtype=dtype, length=length, training=training, batch=batch)

    def forward(
        self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor, documents_BL: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of all tokens whose label is not −100, a scalar in float32 or wider."""
        return cast(torch.Tensor, cast(Any, self.loss)(self.logits(tokens_BS), labels_BS))

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return all logits of the tokens, or of this rank's share of them, ``[B, S, V]``."""
        if self.draws and self.training != torch.is_grad_enabled():
            self.train(torch.is_grad_enabled())  # an evaluation has no dropout
            self.base.training = self.training
        return cast(torch.Tensor, self.base(tokens_BS, None, None) if self.captured else self.base(tokens_BS))

    def first_values(self, drawn: BlockSource) -> BlockSource:
        """Return a source of the values that the class itself draws; the whole model is built once, when it is read."""

        @cache
        def all_values() -> dict[str, torch.Tensor]:
            return built_weights(self._module, self._seed)

        def values(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
            part = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            return all_values()[name][part]

        return values


def capture_module(root: nn.Module, *, dtype: torch.dtype, length: int, training: bool, batch: int = 2) -> Captured:
    """Return the graph of a module that maps ``length`` tokens to logits; raises CaptureError."""
    inputs = {"tokens": tokens_argument(root)}
    return capture(root, dtype=dtype, length=length, inputs=inputs, fixed={}, training=training, batch=batch)


def tokens_argument(root: nn.Module) -> str:
    """Return the name of the first argument of a module's forward pass; raises CaptureError if there is none."""
    forward: Callable[..., Any] = type(root).forward
    names = list(inspect.signature(forward).parameters)[1:]
    if not names:
        raise CaptureError("its forward pass takes no tokens")
    return names[0]
