"""The sums of an evaluation so far, in a file from which a stopped run goes on."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over

FILE = "evaluation.json"


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the sequences of the first ``steps`` steps, equal on all ranks."""

    steps: int = 0
    loss_sum: float = 0.0
    """Sum of the token losses, in nats."""
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.loss_sum / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss; infinite where it exceeds the largest float."""
        return math.exp(self.loss) if self.loss < math.log(torch.finfo(torch.float64).max) else math.inf

    def plus(self, loss_sum: float, tokens: int) -> LossSums:
        """Return the sums after one more step."""
        return LossSums(self.steps + 1, self.loss_sum + loss_sum, self.tokens + tokens)

    def save(self, run_dir: Path, fingerprint: str) -> None:
        """Replace the file in ``run_dir``; ``fingerprint`` names the data and their order."""
        path = run_dir / FILE
        figures = {**asdict(self), "loss": self.loss, "perplexity": _finite(self.perplexity), "data": fingerprint}
        path.with_suffix(".new").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        os.replace(path.with_suffix(".new"), path)


def load_sums(run_dir: Path, fingerprint: str, ranks: Ranks) -> LossSums:
    """Return the sums that rank 0 finds in ``run_dir``, on all ranks; those of no step without a file.

    Raises ConfigurationError PT611 on all ranks for a file that cannot be read, PT616 if it is of other data.
    """
    progress, code = (_read(run_dir / FILE, fingerprint)) if ranks.rank == 0 else (LossSums(), 0)
    sums = torch.tensor(
        [progress.steps, progress.loss_sum, progress.tokens, code], dtype=torch.float64, device=ranks.device
    )
    steps, loss_sum, tokens, failed = sum_over(sums, ranks.world).tolist()
    help = f"delete {FILE} in the run's folder, or start a new run"
    if failed == _DAMAGED:
        raise ConfigurationError("PT611", f"{run_dir / FILE} is damaged", help)
    if failed == _OTHER_DATA:
        raise ConfigurationError("PT616", f"{run_dir / FILE} is of other data, or of the same in another order", help)
    return LossSums(int(steps), loss_sum, int(tokens))


_DAMAGED, _OTHER_DATA = 1, 2


def _read(path: Path, fingerprint: str) -> tuple[LossSums, int]:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        progress = LossSums(int(figures["steps"]), float(figures["loss_sum"]), int(figures["tokens"]))
    except FileNotFoundError:
        return LossSums(), 0
    except (OSError, ValueError, KeyError, TypeError):
        return LossSums(), _DAMAGED
    if figures.get("data") != fingerprint:
        return LossSums(), _OTHER_DATA
    return progress, 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
