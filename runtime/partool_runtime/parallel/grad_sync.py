"""Decides for each micro-batch whether gradients are exchanged and whether gathered parameters are released."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.fsdp import FSDPModule

from partool.spec.parallel import ZeroStage
from partool_runtime.parallel.host_exchange import HostSum
from partool_runtime.parallel.persistent import Persistent


class GradSync:
    """Sets, before each micro-batch, whether its backward pass reduces gradients and releases parameters.

    =====  =====================  ===========================  =========================
    stage  reduce-scatter         all-reduce over replicas     release parameters
    =====  =====================  ===========================  =========================
    0      –                      after the last micro-batch   after the last
    1      after the last         after the last               after the last
    2      after each             after the last               after the last
    3      after each             after the last               after each, and after each block's forward
    =====  =====================  ===========================  =========================

    Gradients that are not yet reduced accumulate unsharded, in the reduction's type (float32 or float64).
    ``reduce_each`` reduces gradients after each micro-batch in all stages. This costs nothing if the optimizer copies
    gradients to the host immediately and no other rank has a part of the gradients.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        *,
        zero: ZeroStage,
        replicas: int,
        persistent: Persistent | None = None,
        reduce_each: bool = False,
        overlapped: HostSum | None = None,
    ) -> None:
        self._modules = modules
        self._persistent = persistent or Persistent([])
        self._reduce_each = zero >= 2 or reduce_each
        self._release_each = zero == 3
        self._replicas = replicas
        self._last: bool | None = None
        """What the latest call of :meth:`before_micro_batch` was told."""
        self._set: tuple[bool, bool, bool] | None = None
        """The flags of all modules; None if they are not known to be equal."""
        self._refreshed = False
        """Whether persistent parameters have the weights of this step."""
        self._overlapped = overlapped
        self._on_micro_batch: Callable[[bool], None] | None = None

    @property
    def comes_each(self) -> bool:
        """Whether gradients are fully reduced after each micro-batch, not only after the step's last micro-batch."""
        return self._reduce_each and self._replicas == 1

    def tell(self, callback: Callable[[bool], None]) -> None:
        """Register a function to call before each micro-batch; its argument is True for the step's last micro-batch."""
        self._on_micro_batch = callback

    def before_micro_batch(self, *, last: bool) -> None:
        """Prepare one forward and backward pass; ``last`` is True for the step's last micro-batch.

        :meth:`after_micro_batch` has to follow the backward pass.
        """
        if self._on_micro_batch is not None:
            self._on_micro_batch(last)
        first = self._last is not False
        self._refresh()
        self._refreshed = not last
        if self._overlapped is not None:
            # FSDP2 adds later micro-batches' sums to the first when a backward pass ends: only the first overlaps.
            self._overlapped.overlap = first or not self._reduce_each
        self._last = last
        self._switch(last or self._reduce_each, last, last or self._release_each)

    def before_ascent(self) -> None:
        """Prepare a forward and backward pass that computes no gradients of parameters.

        Nothing is reduced. Parameters are gathered and released as in the passes of a micro-batch that is not the last.
        """
        self._refresh()
        self._refreshed = True
        self._switch(False, False, self._release_each)

    def _refresh(self) -> None:
        if not self._refreshed:
            self._persistent.refresh()  # the optimizer has changed the weights since the last gather

    def _switch(self, reduce: bool, all_reduce: bool, release: bool) -> None:
        """Set what FSDP2 does in the next passes: reduce gradients, all-reduce them over replicas, and release."""
        if self._set == (reduce, all_reduce, release):
            return
        self._set = (reduce, all_reduce, release)
        for module in self._modules:
            module.set_requires_gradient_sync(reduce, recurse=False)
            if self._replicas > 1:
                module.set_requires_all_reduce(all_reduce, recurse=False)
            module.set_reshard_after_backward(release, recurse=False)

    def after_micro_batch(self) -> None:
        """Wait for reductions that are still in flight."""
        if self._overlapped is not None:
            self._overlapped.finish()

    def release(self) -> None:
        """Free parameters that are still gathered after the passes; the next gather refreshes persistent parameters."""
        self._persistent.expire()
        for module in self._modules:
            module.reshard()
