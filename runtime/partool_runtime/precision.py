"""Types by precision, and dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2)."""

from __future__ import annotations

import torch

from partool.spec.training import Precision

MASTER_DTYPE: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
    "fp8": torch.float32,
}
"""Type of the parameters that the optimizer updates, by precision."""
COMPUTE_DTYPE: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Type of parameters and activations in forward and backward passes, by precision; only products use fp8."""

GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
FIRST_SCALE = 65536.0
SMALLEST_SCALE = 1.0


class LossScaler:
    """The factor of the loss that prevents underflow of fp16 gradients; a power of two, so it changes no mantissa.

    If disabled, the factor stays 1.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.scale = FIRST_SCALE if enabled else 1.0
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Count a step; an overflow halves the factor, :data:`GROWTH_INTERVAL` finite steps in a row double it."""
        if not self._enabled:
            return
        if not finite:
            self.scale = max(SMALLEST_SCALE, self.scale * BACKOFF)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == GROWTH_INTERVAL:
            self.scale *= GROWTH
            self._good_steps = 0

    def state(self) -> dict[str, float | bool]:
        """Return the scaler's state, to be saved in a checkpoint."""
        return {"enabled": self._enabled, "scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: dict[str, float | bool]) -> None:
        """Restore the state from a checkpoint; ignores the state if the precision has changed."""
        if self._enabled and state["enabled"]:
            self.scale = state["scale"]
            self._good_steps = int(state["good_steps"])
