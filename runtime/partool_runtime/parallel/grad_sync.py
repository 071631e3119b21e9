"""When gradients are exchanged, and when gathered parameters are released."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

from partool.spec.parallel import ZeroStage
from partool_runtime.parallel.persistent import Persistent


class GradSync:
    """Sets, before each micro-batch, what its backward pass does with gradients and parameters.

    =====  =====================  ===========================  =========================
    stage  reduce-scatter         all-reduce over replicas     release parameters
    =====  =====================  ===========================  =========================
    0      –                      after the last micro-batch   after the last
    1      after the last         after the last               after the last
    2      after each             after the last               after the last
    3      after each             after the last               after each, and after each block's forward
    =====  =====================  ===========================  =========================

    Gradients that are not yet reduced accumulate whole, in the reduction's type (fp32 or wider).
    """

    def __init__(
        self, modules: Sequence[FSDPModule], *, zero: ZeroStage, replicas: int, persistent: Persistent | None = None
    ) -> None:
        self._modules = modules
        self._persistent = persistent or Persistent([])
        self._reduce_each = zero >= 2
        self._release_each = zero == 3
        self._replicas = replicas
        self._last: bool | None = None

    def before_micro_batch(self, *, last: bool) -> None:
        """Prepare one forward and backward pass; ``last`` says whether it ends the step's accumulation."""
        if self._last is not False:
            self._persistent.refresh()  # the optimizer has changed the weights since
        if last is self._last:
            return
        self._last = last
        for module in self._modules:
            module.set_requires_gradient_sync(last or self._reduce_each, recurse=False)
            if self._replicas > 1:
                module.set_requires_all_reduce(last, recurse=False)
            module.set_reshard_after_backward(last or self._release_each, recurse=False)

    def release(self) -> None:
        """Drop gathered parameters that passes have left; what stays gathered is brought again by the next gather."""
        self._persistent.expire()
        for module in self._modules:
            module.reshard()
