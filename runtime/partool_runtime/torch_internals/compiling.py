"""Notice of torch's compilations, and compilations that generate no code, through private parts of its compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch._dynamo.callback import callback_handler
from torch._functorch import config

_BACKEND = "aot_eager_decomp_partition"
"""Backend of ``torch.compile``: decompositions and partitioner of the default backend, operators run one by one."""


class Phases(Protocol):
    """What is told about compilations: see :class:`partool_runtime.pulse.Pulse`."""

    def during(self, phase: Any) -> AbstractContextManager[None]:
        """Return a context manager of a phase."""


def watch_compilation(phases: Phases) -> None:
    """Tell ``phases`` for the rest of this process that torch compiles, whenever it does."""
    stack = ExitStack()
    callback_handler.register_start_callback(lambda _: stack.enter_context(phases.during("compiling")))
    callback_handler.register_end_callback(lambda _: stack.close())


@contextmanager
def partitioned() -> Iterator[None]:
    """Make ``torch.compile`` choose what a backward pass keeps and what it computes again, without generating code.

    Random numbers are recomputed through copies of their generator's state: the other way needs a GPU's generator.
    """
    patch = config.patch(graphsafe_rng_functionalization=False)
    try:
        with patch, torch.compiler.set_stance("default", force_backend=_BACKEND):
            yield
    finally:
        torch.compiler.reset()  # graphs of one rank must not run on another one
