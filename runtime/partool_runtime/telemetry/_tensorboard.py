"""TensorBoard event files, where the plan requests them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partool_runtime.errors import ConfigurationError
from partool_runtime.telemetry._figures import TrainingFigures


class TensorBoard:
    """Writes the figures of log steps into ``tensorboard/`` of the run's folder.

    Raises ConfigurationError (PT540) if the package is missing.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "PT540",
                f"launch.tensorboard is true, but TensorBoard cannot be imported: {error}",
                "pip install 'partool[tensorboard]', or set launch.tensorboard: false",
            ) from None
        self._writer: Any = SummaryWriter(log_dir=str(run_dir / "tensorboard"), max_queue=20, flush_secs=30)

    def log(self, figures: TrainingFigures) -> None:
        """Write a log step."""
        scalars = {
            "train/loss": figures.loss,
            "train/grad_norm": figures.grad_norm,
            "train/lr": figures.lr,
            "speed/tokens_per_s": figures.tokens_per_s,
            "speed/step_time_s": figures.step_time_s,
            "speed/mfu": figures.mfu,
            "memory/peak_bytes": figures.memory_bytes,
        }
        for tag, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(tag, value, figures.step)
        for name, mean in (figures.preferences or {}).items():
            self._writer.add_scalar(f"preferences/{name}", mean, figures.step)

    def validation(self, step: int, loss: float) -> None:
        """Write a validation's loss."""
        self._writer.add_scalar("validation/loss", loss, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
