"""Decides when a pipeline rank gathers and releases parameters, and reduces gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from partool.schedule import COMPUTE, Action
from partool.spec.parallel import ZeroStage
from partool_runtime.parallel.persistent import Persistent
from partool_runtime.torch_internals.fsdp import end_backward, keep_gradients

Timer = Callable[[str], AbstractContextManager[object]]


class Unit:
    """Parameters of one stage, or parameters that two stages share; one action completes all their gradients."""

    def __init__(self, root: FSDPModule, stages: frozenset[int], persistent: Persistent | None = None) -> None:
        self.root = root
        self.persistent = persistent or Persistent([])
        """Parameters that stay gathered."""
        self.stages = stages
        """Stages of this rank that use these parameters."""
        self.modules = [module for module in cast(nn.Module, root).modules() if isinstance(module, FSDPModule)]


class PipelineSync:
    """A ``StageSync`` that sets before each action whether the action reduces gradients and releases parameters.

    A backward pass is one action B, or an action I (input gradients) and a later action W (weight gradients). A stage's
    gradients grow with each B or W. The first forward pass that needs parameters gathers the parameters.

    =====  =======================  ==========================  ==========================
    ZeRO   reduce-scatter           all-reduce over replicas    release parameters
    =====  =======================  ==========================  ==========================
    0      –                        after the last B or W       after the last B or W
    1      after the last B or W    after the last              after the last
    2      after each B or W        after the last              after the last
    3      after each B or W        after the last              after each B or I, and after each block's forward pass
    =====  =======================  ==========================  ==========================

    A stage without backward actions (frozen, or evaluated) is released after its last forward pass. In a full backward
    pass the exchange of one block's gradients overlaps with the pass through the previous block; gradients of a W
    action are exchanged when the action ends, since autograd does not see these gradients.
    """

    def __init__(self, actions: Sequence[Action], units: Sequence[Unit], *, zero: ZeroStage, replicas: int) -> None:
        """``actions`` is the rank's list of a training step."""
        self._units = units
        self._reduce_each = zero >= 2
        self._release_each = zero == 3
        self._replicas = replicas
        self._last = [_last(actions, unit) for unit in units]
        self._set: list[tuple[bool, bool, bool] | None] = [None] * len(units)
        self._timer: Timer = _untimed
        self._measured: AbstractContextManager[object] = nullcontext()

    def use(self, timer: Timer) -> None:
        """Measure the actions of the next step with ``timer``."""
        self._timer = timer
        for unit in self._units:
            unit.persistent.refresh()

    def before(self, action: Action) -> None:
        """Prepare a compute action, and start its time measurement."""
        for index, unit in enumerate(self._units):
            if action.stage in unit.stages and action.kind in ("B", "I"):
                self._exchange(index, action)
        self._measured = self._timer("forward" if action.kind == "F" else "backward")
        self._measured.__enter__()

    def after(self, action: Action) -> None:
        """End the time measurement; reduce gradients after a W, and release parameters if no backward pass follows."""
        self._measured.__exit__(None, None, None)
        for index, unit in enumerate(self._units):
            if action.stage not in unit.stages:
                continue
            if action.kind == "W":
                self._end(index, action)
            elif action.kind == "F" and action == self._last[index]:
                _release(unit)

    def finish(self) -> None:
        """Release parameters that are still gathered: an evaluation or an aborted step ends without backward passes."""
        for unit in self._units:
            _release(unit)
            unit.persistent.expire()
        self._timer = _untimed

    def _end(self, index: int, action: Action) -> None:
        """Reduce gradients and release parameters after a W action, whose weight gradients autograd does not see."""
        root = self._units[index].root
        keep_gradients(root)
        if self._reduce_each or action == self._last[index]:
            self._exchange(index, action)
            with self._timer("gradient_sync"):
                end_backward(root, fill=self._replicas > 1)

    def _exchange(self, index: int, action: Action) -> None:
        """Set FSDP2's flags for the end of the next backward pass, if they differ from the current ones."""
        last = action == self._last[index]
        completes = action.kind != "I"
        wanted = (completes and (last or self._reduce_each), last, last or self._release_each)
        if self._set[index] == wanted:
            return
        self._set[index] = wanted
        reduces, reduces_over_replicas, releases = wanted
        for module in self._units[index].modules:
            module.set_requires_gradient_sync(reduces, recurse=False)
            if self._replicas > 1:
                module.set_requires_all_reduce(reduces_over_replicas, recurse=False)
            module.set_reshard_after_backward(releases, recurse=False)


def _last(actions: Sequence[Action], unit: Unit) -> Action | None:
    """Return the action that completes a unit's gradients, or the unit's last forward pass if it gets no gradients."""
    unit_actions = [action for action in actions if action.stage in unit.stages and action.kind in COMPUTE]
    completing = [action for action in unit_actions if action.kind in ("B", "W")]
    return next(reversed(completing or unit_actions), None)


def _release(unit: Unit) -> None:
    for module in unit.modules:
        module.reshard()


def _untimed(term: str) -> AbstractContextManager[object]:
    return nullcontext()
