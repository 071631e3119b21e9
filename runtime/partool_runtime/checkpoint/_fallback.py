"""The checkpoint from which a run goes on: the newest, or the newest intact one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from partool_runtime.checkpoint.checkpointer import Checkpointer
from partool_runtime.errors import ConfigurationError

_DAMAGED = "PT611"
"""Code of the error about a damaged checkpoint."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that was loaded."""

    step: int
    """Number of steps after which it was saved; 0 if there is none."""
    notes: tuple[str, ...] = ()
    """What the user must learn about newer checkpoints, which are damaged."""


def load_newest(checkpointer: Checkpointer, load: Callable[[int, bool], None], *, fallback: bool) -> Resumed:
    """Call ``load`` with the step of the newest checkpoint; a collective.

    If ``load`` finds the checkpoint damaged and ``fallback`` is True on rank 0, it is called with older steps, until a
    checkpoint is intact; the damaged ones are then renamed and kept. The second argument of ``load`` says whether an
    error about damage shall name the newest intact checkpoint. Raises the errors of ``load``; if no checkpoint is
    intact, that of the newest, and then renames nothing.
    """
    fallback = checkpointer.of_first(fallback)
    damaged: dict[int, ConfigurationError] = {}
    for step in checkpointer.steps():
        try:
            load(step, not fallback)
        except ConfigurationError as error:
            if not fallback or error.code != _DAMAGED:
                raise
            damaged[step] = error
            continue
        names = checkpointer.set_aside_after(step) if damaged else []
        return Resumed(step, tuple(map(_note, damaged, damaged.values(), names, [step] * len(names))))
    if damaged:
        newest = damaged[max(damaged)]
        raise ConfigurationError(newest.code, newest.message, "there is no intact checkpoint to fall back to")
    return Resumed(0)


def _note(damaged: int, error: ConfigurationError, name: str, step: int) -> str:
    return (
        f"PT659: the checkpoint of step {damaged} is skipped and kept as {name}, as {error.message}; "
        f"training goes on from step {step}"
    )
