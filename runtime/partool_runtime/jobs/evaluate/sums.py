"""The sums of an evaluation so far, in a checkpoint from which a stopped run goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from partool.plan.evaluation_result import EVALUATION_FILE, EvaluationResult, SetResult
from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over

_STEPS = "step-" + "[0-9]" * 8
_READ, _DAMAGED, _OTHER_EVALUATION = range(3)
"""What rank 0 tells the other ranks about the newest checkpoint."""


class SetSums(NamedTuple):
    """Sums over the sequences of one set so far."""

    loss_sum: float = 0.0
    """Sum of the token losses, in nats."""
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.loss_sum / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the sequences of the first ``steps`` steps, equal on all ranks."""

    sets: Mapping[str, SetSums]
    """Sums of each set by its name, which is empty for the data without one."""
    steps: int = 0

    @classmethod
    def none(cls, names: Iterable[str]) -> LossSums:
        """Return the sums of no step."""
        return cls(dict.fromkeys(names, SetSums()))

    @property
    def total(self) -> SetSums:
        """Sums of the data without a name; where there are only named sets, of all of them."""
        if "" in self.sets:
            return self.sets[""]
        every = self.sets.values()
        return SetSums(sum(each.loss_sum for each in every), sum(each.tokens for each in every))

    def plus(self, name: str, loss_sum: float, tokens: int) -> LossSums:
        """Return the sums after one more step, of the set ``name``."""
        before = self.sets[name]
        after = SetSums(before.loss_sum + loss_sum, before.tokens + tokens)
        return LossSums({**self.sets, name: after}, self.steps + 1)

    def report(self, run_dir: Path) -> EvaluationResult:
        """Write the result into the run's folder, and return it."""
        total = self.total
        named = {name: SetResult.of(each.tokens, each.loss) for name, each in self.sets.items() if name}
        figures = SetResult.of(total.tokens, total.loss).model_dump()
        result = EvaluationResult(**figures, steps=self.steps, sets=named)
        _write(run_dir / EVALUATION_FILE, result.model_dump())
        return result

    def save(self, folder: Path, identity: str) -> None:
        """Save the sums as the only checkpoint in ``folder``; ``identity`` is a hash of what decides the sums."""
        path = folder / f"step-{self.steps:08d}"
        partial = path.with_name(f"{path.name}.tmp")
        partial.mkdir(parents=True, exist_ok=True)
        sets = {name: list(each) for name, each in self.sets.items()}
        _write(partial / EVALUATION_FILE, {"steps": self.steps, "sets": sets, "identity": identity})
        if not path.exists():
            partial.rename(path)
        for older in folder.glob(_STEPS):
            if older != path:
                shutil.rmtree(older, ignore_errors=True)


def load_sums(folder: Path, identity: str, ranks: Ranks, names: Sequence[str]) -> LossSums:
    """Return the sums of the newest checkpoint that rank 0 sees in ``folder``, on all ranks; those of no step without.

    ``names`` are those of the evaluated sets. Raises ConfigurationError on all ranks: PT611 for a file that cannot be
    read, PT616 for one of another evaluation.
    """
    newest = max(folder.glob(_STEPS), default=None) if ranks.rank == 0 else None
    none = LossSums.none(names)
    sums, code = (none, _READ) if newest is None else _read(newest / EVALUATION_FILE, identity, none)
    flat = [figure for name in names for figure in sums.sets[name]]
    numbers = torch.tensor([*flat, sums.steps, code], dtype=torch.float64, device=ranks.device)
    *flat, steps, failed = sum_over(numbers, ranks.world).tolist()
    help = "start a new run"
    if failed == _DAMAGED:
        raise ConfigurationError("PT611", f"{folder}: the checkpoint of an evaluation is damaged", help)
    if failed == _OTHER_EVALUATION:
        raise ConfigurationError(
            "PT616",
            f"{folder}: it is of another evaluation: model, weights, data, batch, steps or seed differ",
            help,
        )
    pairs = zip(names, flat[::2], flat[1::2], strict=True)
    return LossSums({name: SetSums(loss_sum, int(tokens)) for name, loss_sum, tokens in pairs}, int(steps))


def _read(path: Path, identity: str, none: LossSums) -> tuple[LossSums, int]:
    """Return the sums in a file, or ``none``, and a code that says why."""
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        if figures["identity"] != identity:
            return none, _OTHER_EVALUATION
        sets = {name: figures["sets"][name] for name in none.sets}
        sums = {name: SetSums(float(loss_sum), int(tokens)) for name, (loss_sum, tokens) in sets.items()}
        return LossSums(sums, int(figures["steps"])), _READ
    except (OSError, ValueError, KeyError, TypeError):
        return none, _DAMAGED


def _write(path: Path, figures: Mapping[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)
