"""Notice of torch's compilations, through its compiler's private callbacks."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch._dynamo.callback import callback_handler


class Phases(Protocol):
    """What is told about compilations: see :class:`partool_runtime.pulse.Pulse`."""

    def during(self, phase: Any) -> AbstractContextManager[None]:
        """Return a context manager of a phase."""


def watch_compilation(phases: Phases) -> None:
    """Tell ``phases`` for the rest of this process that torch compiles, whenever it does."""
    stack = ExitStack()
    callback_handler.register_start_callback(lambda _: stack.enter_context(phases.during("compiling")))
    callback_handler.register_end_callback(lambda _: stack.close())
