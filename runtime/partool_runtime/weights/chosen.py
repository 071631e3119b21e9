"""The weights of a run that are asked for: those of a checkpoint, their moving average, or a mean of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from partool.layout.checkpoint import AVERAGE, WEIGHTS
from partool.layout.parameters import is_selection_bias
from partool.plan.record import DamagedRecordError
from partool.plan.types import Plan
from partool.plan.validations import read_validations
from partool.spec.judging import BestSpec
from partool_runtime.checkpoint import VerifiedFolder, step_folder, steps_in, tensor_shapes
from partool_runtime.errors import ConfigurationError
from partool_runtime.weights.from_checkpoint import check_shapes, load_whole


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """Which weights of a run are meant; by default those of its newest checkpoint."""

    step: int | None = None
    """The checkpoint; with ``mean_of``, the newest of them."""
    best: bool = False
    """The checkpoint of the best validation, in place of ``step``."""
    mean_of: int = 1
    """Number of checkpoints, up to the newest, whose weights are averaged."""
    ema: bool = False
    """Whether the moving average that the training kept is meant; what it did not train has its weights."""


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """Weights of one checkpoint or of several, which are read whole, tensor by tensor."""

    folders: Sequence[Path]
    """Folders of the checkpoints, the newest last."""
    ema: bool = False

    @property
    def newest(self) -> Path:
        """Folder of the newest of the checkpoints."""
        return self.folders[-1]

    @property
    def changed(self) -> bool:
        """Whether they are other weights than those that the newest checkpoint trains on with."""
        return self.ema or len(self.folders) > 1

    @property
    def title(self) -> str:
        """What they are, in words."""
        if self.ema:
            return f"the moving average of {self.newest.name}"
        names = [folder.name for folder in self.folders]
        return f"the mean of {', '.join(names)}" if len(names) > 1 else names[0]

    def load(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, torch.Tensor]:
        """Return the weights cast to ``dtype``, by name; see :func:`~.from_checkpoint.load_whole`.

        Raises ConfigurationError PT627 if a moving average is meant and the checkpoint has none.
        """
        if not self.changed:
            return load_whole(self.newest, dtype, shapes)
        for folder in self.folders if shapes is not None else ():
            check_shapes(folder, shapes or {})
        wide = torch.promote_types(dtype, torch.float32)
        return {name: tensor.to(wide if is_selection_bias(name) else dtype) for name, tensor in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight whole, by name, in float64 where it is a mean; at most two are in memory at once."""
        saved = tensor_shapes(self.newest)
        if self.ema and not any(name.startswith(f"{AVERAGE}.") for name in saved):
            message = f"{self.newest} holds no moving average of the weights"
            raise ConfigurationError("PT627", message, "training: {ema: 0.999} keeps one; --average N is a mean")
        sources = [VerifiedFolder(folder) for folder in self.folders]
        for key in [name for name in saved if name.startswith(WEIGHTS)]:
            name = key.removeprefix(WEIGHTS)
            averaged = f"{AVERAGE}.{name}"
            if self.ema:
                yield name, sources[-1].tensor(averaged if averaged in saved else key)
            else:
                yield name, _mean(sources, key)


def _mean(sources: Sequence[VerifiedFolder], key: str) -> torch.Tensor:
    """Return the mean over checkpoints of a tensor, in float64; of whole numbers, such as codes, the newest."""
    newest = sources[-1].tensor(key)
    if not newest.is_floating_point():
        return newest
    total = newest.double()
    for source in sources[:-1]:
        total += source.tensor(key)
    return total / len(sources)


def choose(plan: Plan, folder: Path, choice: WeightsChoice) -> ChosenWeights:
    """Return the weights that are meant of the checkpoints in ``folder``.

    Raises ConfigurationError PT620 (no checkpoint), PT626 (no best one is known), PT628 (fewer than are averaged).
    """
    steps = steps_in(folder)
    if not steps:
        raise ConfigurationError("PT620", f"there is no checkpoint in {folder}", "The run has not saved one yet.")
    step = _best(plan, folder, steps) if choice.best else steps[-1] if choice.step is None else choice.step
    if choice.mean_of == 1:
        return ChosenWeights([step_folder(folder, step)], choice.ema)
    upto = [each for each in steps if each <= step]
    if len(upto) < choice.mean_of:
        message = f"{choice.mean_of} checkpoints are to be averaged, and {folder} has {len(upto)} up to step {step}"
        present = f"there are those of steps {', '.join(map(str, upto))}" if upto else "there are none"
        raise ConfigurationError("PT628", message, f"{present}; checkpoint.keep says how many a run keeps")
    return ChosenWeights([step_folder(folder, each) for each in upto[-choice.mean_of :]], choice.ema)


def _best(plan: Plan, folder: Path, steps: Sequence[int]) -> int:
    try:
        best = read_validations(folder).best(plan.checkpoint.best or BestSpec(), 1, steps)
    except DamagedRecordError as error:
        raise ConfigurationError("PT626", str(error), "name a checkpoint with --step") from None
    if not best:
        message = f"no validation of a checkpoint in {folder} is recorded"
        raise ConfigurationError("PT626", message, "checkpoint: {best: loss} keeps the best, and the record")
    return best[0]
