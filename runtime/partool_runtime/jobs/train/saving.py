"""Schedule and content of a run's checkpoints, and resuming from them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from partool.plan.types import Plan
from partool.spec.numbers import duration_s
from partool_runtime.checkpoint import Arena, Checkpointer, CheckpointExtra, WriteStats, load_newest
from partool_runtime.errors import ConfigurationError
from partool_runtime.jobs.train.keeping import Keeper, ValidationVerdict
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks
from partool_runtime.model import AnyDecoder
from partool_runtime.optim.types import Optimizer
from partool_runtime.parallel.comm import maximum_over
from partool_runtime.pieces import Value, placed
from partool_runtime.precision import LossScaler


class Saver:
    """Writes and loads the run's checkpoints, which hold weights and moments under their names, and a few numbers.

    The order of samples and the learning rate are functions of the step, so they need no state.
    """

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        ranks: Ranks,
        *,
        model: AnyDecoder,
        optimizer: Optimizer,
        scaler: LossScaler,
        stepper: Stepper,
        fingerprint: str,
        arena: Arena | None = None,
        base: str = "",
    ) -> None:
        """Take the run's parts; ``base`` is the checksum of the weights beside an adapter, empty without one."""
        self.notes: list[str] = []
        """What the user must learn about the checkpoint that :meth:`resume` has chosen."""
        # Taken before the first forward pass, after which modules may hold gathered parameters.
        self._state = state_of(model, optimizer, trained_only=plan.adapter is not None)
        self._plan = plan
        self._ranks = ranks
        self._optimizer = optimizer
        self._scaler = scaler
        self._stepper = stepper
        self._fingerprint = fingerprint
        self._base = base
        spec = plan.checkpoint
        self._every_steps = spec.every if isinstance(spec.every, int) else 0
        self._every_s = duration_s(spec.every) or 0.0 if isinstance(spec.every, str) else 0.0
        self._saved_at_s = time.monotonic()
        self._saved_step = -1
        self._proven: int | None = None
        """Step of the newest checkpoint from whose weights a later step computed finite gradients."""
        self._owed = False
        """Whether a checkpoint was deferred because steps are skipped."""
        self._reported_step = -1
        folder = Path(spec.dir) / run_dir.name if spec.dir else run_dir / "checkpoints"
        self._checkpointer = Checkpointer(
            folder,
            keep=spec.keep,
            mode="sync" if spec.mode == "sync" else "async",
            rank=ranks.rank,
            world_size=ranks.world_size,
            run=run_dir.name,
            arena=arena,
        )
        self._keeper = Keeper(
            plan,
            folder,
            rank=ranks.rank,
            maximum_over_ranks=lambda value: maximum_over(value, ranks.world, ranks.device),
        )

    def begin(self, step: int) -> int:
        """Take the validations up to ``step``, after which training goes on, and return it."""
        self._keeper.begin(step)
        self.notes += self._keeper.notes
        return step

    def judge(self, step: int, figures: Mapping[str, float]) -> ValidationVerdict:
        """See :meth:`partool_runtime.jobs.train.keeping.Keeper.judge`."""
        return self._keeper.judge(step, figures)

    def resume(self, *, fallback: bool = False) -> int:
        """Load the newest checkpoint and return the number of steps after which it was saved; 0 without a checkpoint.

        If it is damaged and ``fallback`` is True on rank 0, load the newest intact one instead and set the damaged ones
        aside; :attr:`notes` then says so. Raises ConfigurationError PT611 if a checkpoint is damaged, and PT612 if it
        is of another model, PT616 if it was trained on other data, PT679 if it was trained by another optimizer.
        """
        resumed = load_newest(self._checkpointer, self._load, fallback=fallback)
        self.notes += resumed.notes
        if resumed.step:
            self._saved_step = resumed.step
        return self.begin(resumed.step)

    def _load(self, step: int, advise: bool) -> None:
        state = dict(self._state)

        average = self._optimizer.average

        def accept(extra: CheckpointExtra) -> None:
            self._accept(step, extra)
            state.update(self._optimizer.expect(extra))
            if average is not None and not extra.get("average", False):
                for name in average.state():
                    del state[name]

        extra = self._checkpointer.load(step, state, accept, advise=advise)
        if extra["model"] != self._plan.model.model_dump(mode="json"):
            raise ConfigurationError("PT612", f"the checkpoint of step {step} is of another model", _same_help("model"))
        if extra["data"] != self._fingerprint:
            message = f"the checkpoint of step {step} was trained on other data, or on the same in another order"
            raise ConfigurationError("PT616", message, _same_help("data, training.seed and training.global_batch"))
        if average is not None and not extra.get("average", False):
            average.restart()
            self.notes.append(
                f"PT629: the checkpoint of step {step} holds no moving average: it begins with the weights of that step"
            )
        self._scaler.load(extra["scaler"])
        self._stepper.nonfinite_in_row = extra["nonfinite_in_row"]

    def _accept(self, step: int, extra: CheckpointExtra) -> None:
        """Refuse moments of another optimizer, whose names may have other meanings, and adapters of another base."""
        name, saved = self._plan.optimizer.name, extra.get("optimizer", "adamw")  # older checkpoints name none
        if saved != name:
            message = f"the checkpoint of step {step} was trained with {saved}, and optimizer.name is {name}"
            help = (
                f"{_same_help('optimizer')}; a new run can have its weights: model: {{weights: {{source: checkpoint}}}}"
            )
            raise ConfigurationError("PT679", message, help)
        if extra.get("base", "") != self._base:
            message = f"the adapter of step {step} was trained beside other frozen weights, or in another precision"
            raise ConfigurationError("PT618", message, _same_help("model.weights and training.precision"))

    def flags(self) -> list[float]:
        """Return 1 on rank 0 if the time between checkpoints has passed, else 0; nothing if steps are counted instead.

        The ranks add up their flags within a step, and pass the sums to :meth:`due`.
        """
        if not self._every_s:
            return []
        return [float(self._ranks.rank == 0 and time.monotonic() - self._saved_at_s >= self._every_s)]

    def due(self, step: int, flags: Sequence[float] = ()) -> bool:
        """Return whether to save the state after ``step`` steps, the same on all ranks; call this after each step.

        ``flags`` are the sums of all ranks' :meth:`flags` within that step.

        While steps are skipped nothing is saved, as the weights may be the cause; a due checkpoint is saved after the
        next step that is not skipped.
        """
        counted = self._every_steps > 0 and step % self._every_steps == 0
        due = counted or any(flags) or self._owed
        if self._stepper.nonfinite_in_row:
            self._owed = due
            return False
        if self._saved_step >= 0:
            self._proven = self._saved_step
        return due

    def save(self, step: int, *, wait: bool = False) -> None:
        """Save the state after ``step`` steps unless it is saved already; ``wait`` waits for the end of the write.

        The oldest checkpoints beyond the number to keep are deleted, but none is deleted while steps are skipped. The
        newest checkpoint that a finite step followed is never deleted, because a later checkpoint may hold weights with
        which training fails.
        """
        if step == self._saved_step:
            return self._checkpointer.wait() if wait else None
        extra: CheckpointExtra = {
            "step": step,
            "model": self._plan.model.model_dump(mode="json"),
            "data": self._fingerprint,
            "optimizer": self._plan.optimizer.name,
            "base": self._base,
            "average": self._optimizer.average is not None,
            **self._optimizer.numbers(),
            "scaler": self._scaler.state(),
            "nonfinite_in_row": self._stepper.nonfinite_in_row,
        }
        with torch.no_grad():
            self._optimizer.settle()
            skipping = self._stepper.nonfinite_in_row > 0
            self._checkpointer.save(
                step, self._state, extra, wait=wait, prune=not skipping, proven=self._proven, best=self._keeper.kept
            )
        self._keeper.saved(step)
        self._saved_step, self._owed = step, False
        self._saved_at_s = time.monotonic()
        return None

    def finished_write(self) -> WriteStats | None:
        """Return the latest complete write's statistics; None if no write is complete or they were returned before."""
        stats = self._checkpointer.last_write
        if stats is None or stats.step == self._reported_step:
            return None
        self._reported_step = stats.step
        return stats

    def close(self) -> None:
        """Wait for the write in flight."""
        self._checkpointer.close()


def state_of(model: AnyDecoder, optimizer: Optimizer, *, trained_only: bool = False) -> dict[str, Value]:
    """Return weights and moments by name, each with its place in the whole tensor.

    ``trained_only`` leaves out frozen weights, for which a checksum stands where the model has an adapter.
    """
    masters = optimizer.masters()
    tensors = {
        f"model.{name}": masters.get(name, p).detach()
        for name, p in model.named_parameters()
        if p.requires_grad or not trained_only
    }
    tensors |= optimizer.state()
    values = {key: placed(tensor, model.placements.get(key.partition(".")[2])) for key, tensor in tensors.items()}
    return values | optimizer.placed_state()


def _same_help(what: str) -> str:
    return f"start a new run, or resume with the same {what}"
