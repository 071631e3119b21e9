"""The sums of an evaluation so far, in a checkpoint from which a stopped run goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch

from partool.plan.evaluation_result import EVALUATION_FILE, EvaluationResult
from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over

_STEPS = "step-" + "[0-9]" * 8
_READ, _DAMAGED, _OTHER_EVALUATION = range(3)
"""What rank 0 tells the other ranks about the newest checkpoint."""


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

    def plus(self, loss_sum: float, tokens: int) -> LossSums:
        """Return the sums after one more step."""
        return LossSums(self.steps + 1, self.loss_sum + loss_sum, self.tokens + tokens)

    def report(self, run_dir: Path) -> EvaluationResult:
        """Write the result into the run's folder, and return it."""
        result = EvaluationResult.of(self.steps, self.tokens, self.loss)
        _write(run_dir / EVALUATION_FILE, result.model_dump())
        return result

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

    Raises ConfigurationError on all ranks: PT611 for a file that cannot be read, PT616 for one of another evaluation.
    """
    newest = max(folder.glob(_STEPS), default=None) if ranks.rank == 0 else None
    sums, code = (LossSums(), _READ) if newest is None else _read(newest / EVALUATION_FILE, identity)
    numbers = torch.tensor([*astuple(sums), code], dtype=torch.float64, device=ranks.device)
    steps, loss_sum, tokens, failed = sum_over(numbers, ranks.world).tolist()
    help = "start a new run"
    if failed == _DAMAGED:
        raise ConfigurationError("PT611", f"{folder}: the checkpoint of an evaluation is damaged", help)
    if failed == _OTHER_EVALUATION:
        raise ConfigurationError(
            "PT616",
            f"{folder}: it is of another evaluation: model, weights, data, batch, steps or seed differ",
            help,
        )
    return LossSums(int(steps), loss_sum, int(tokens))


def _read(path: Path, identity: str) -> tuple[LossSums, int]:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        sums = LossSums(int(figures["steps"]), float(figures["loss_sum"]), int(figures["tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return LossSums(), _DAMAGED
    if figures.get("identity") != identity:
        return LossSums(), _OTHER_EVALUATION
    return sums, _READ


def _write(path: Path, figures: Mapping[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)
