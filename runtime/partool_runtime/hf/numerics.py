"""Changes the numerics of transformers code so that float64 tensors stay in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from partool_runtime.hf.patches import Patch, patch_forward


class KeepWide(TorchFunctionMode):
    """Makes functions of float64 tensors return float64 where float32 is requested.

    Models of transformers compute statistics and rotations in float32, for inputs of any type. For 16-bit inputs
    float32 adds precision, but of a float64 input it would keep only seven digits.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``; if its first argument is a float64 tensor, request float64 in place of float32."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0] if args[0].is_contiguous() else args[0].clone()  # contiguous, as after a cast
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def stay_wide(module: nn.Module) -> None:
    """Change a module in place: its forward pass runs in :class:`KeepWide` whenever its parameters are float64.

    Apply it before recomputation, which runs the forward pass a second time, outside of wrappers around the model.
    """
    forward = module.forward

    @wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        first = next(module.parameters(), None)
        if first is None or first.dtype != torch.float64:
            return forward(*args, **kwargs)
        with KeepWide():
            return forward(*args, **kwargs)

    patch_forward(module, Patch.FLOAT64, wide)
