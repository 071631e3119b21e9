"""The sums of an evaluation so far, in a checkpoint from which a stopped run goes on."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from partool.plan.evaluation_result import EVALUATION_FILE
from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over

_STEPS = "step-" + "[0-9]" * 8


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
        """Exponential of the mean loss; infinite where it exceeds the largest float, NaN if the loss is."""
        return math.inf if self.loss > math.log(torch.finfo(torch.float64).max) else math.exp(self.loss)

    def plus(self, loss_sum: float, tokens: int) -> LossSums:
        """Return the sums after one more step."""
        return LossSums(self.steps + 1, self.loss_sum + loss_sum, self.tokens + tokens)

    def report(self, run_dir: Path) -> None:
        """Write the result into the run's folder."""
        _write(
            run_dir / EVALUATION_FILE,
            {
                name: _finite(value)
                for name, value in (*asdict(self).items(), ("loss", self.loss), ("perplexity", self.perplexity))
            },
        )

    def save(self, folder: Path, identity: str) -> None:
        """Save the sums as the only checkpoint in ``folder``; ``identity`` is a hash of what decides the sums."""
        path = folder / f"step-{self.steps:08d}"
        partial = path.with_name(f"{path.name}.tmp")
        partial.mkdir(parents=True, exist_ok=True)
        _write(partial / EVALUATION_FILE, asdict(self) | {"identity": identity})
        if not path.exists():
            partial.rename(path)
        for older in folder.glob(_STEPS):
            if older != path:
                shutil.rmtree(older, ignore_errors=True)


def load_sums(folder: Path, identity: str, ranks: Ranks) -> LossSums:
    """Return the sums of the newest checkpoint that rank 0 sees in ``folder``, on all ranks; those of no step without.

    Raises ConfigurationError PT611 on all ranks for a file that cannot be read, PT616 if other data,
    weights or steps gave it.
    """
    newest = max(folder.glob(_STEPS), default=None) if ranks.rank == 0 else None
    progress, code = (LossSums(), 0) if newest is None else _read(newest / EVALUATION_FILE, identity)
    sums = torch.tensor(
        [progress.steps, progress.loss_sum, progress.tokens, code], dtype=torch.float64, device=ranks.device
    )
    steps, loss_sum, tokens, failed = sum_over(sums, ranks.world).tolist()
    help = "start a new run"
    if failed == _DAMAGED:
        raise ConfigurationError("PT611", f"{folder}: the checkpoint of an evaluation is damaged", help)
    if failed == _OTHER:
        raise ConfigurationError(
            "PT616",
            f"{folder}: it is of another evaluation: model, weights, data, batch, steps or seed differ",
            help,
        )
    return LossSums(int(steps), loss_sum, int(tokens))


_DAMAGED, _OTHER = 1, 2


def _read(path: Path, identity: str) -> tuple[LossSums, int]:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        progress = LossSums(int(figures["steps"]), float(figures["loss_sum"]), int(figures["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return LossSums(), _DAMAGED
    if figures.get("identity") != identity:
        return LossSums(), _OTHER
    return progress, 0


def _write(path: Path, figures: Mapping[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
