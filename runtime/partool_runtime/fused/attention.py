"""Attention of whole sequences on GPUs by the fastest of torch's kernels, as measured for a rank's heads."""

from __future__ import annotations

import torch
from torch import nn

from partool.plan.types import Plan
from partool_kernels.select import Answer, NothingWorksError, Selector
from partool_kernels.select.attention import Attend, HeadSizes, attention, newer
from partool_kernels.select.here import selector
from partool_runtime.model.attention import AttentionLayout, SelfAttention, Tokens, attend
from partool_runtime.precision import COMPUTE_DTYPE


class Selected:
    """An attention core that calls a selected kernel; windowed, document and grid attention use the default core."""

    def __init__(self, by: Attend, answer: Answer, of: tuple[torch.dtype, int]) -> None:
        """``by`` is the kernel, ``answer`` its measurement; it is used only for inputs of (type, length) ``of``."""
        self._by, self._of = by, of
        self.answer = answer

    def __call__(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        tokens: Tokens | None = None,
        *,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the result of :func:`partool_runtime.model.attention.attend`."""
        windowed = layout.window is not None and layout.window < k_BKSD.shape[2]
        other = layout.axis is not None or sinks_N is not None or (q_BNSD.dtype, q_BNSD.shape[2]) != self._of
        if other or windowed or (tokens is not None and tokens.documents_BL is not None):
            return attend(q_BNSD, k_BKSD, v_BKSD, layout, tokens, sinks_N=sinks_N)
        return self._by(q_BNSD, k_BKSD, v_BKSD)


def select_attention(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Measure kernels, and replace layers' default attention cores by the fastest one, on CUDA and ROCm.

    No core is replaced with sequence parallelism, two-dimensional tensor parallelism or types with more than 16 bits.
    No kernel is measured in deterministic training or with ``kernels.mode: torch``.
    """
    narrow = COMPUTE_DTYPE[plan.training.precision] in (torch.float16, torch.bfloat16)
    wanted = device.type == "cuda" and plan.kernels.mode != "torch" and not plan.training.deterministic
    if wanted and narrow and plan.layout.tensor.inner == 1:
        put(model, plan, device, selector(device))
        # Measurements leave cached blocks of sizes that training does not use.
        torch.cuda.empty_cache()


def put(model: nn.Module, plan: Plan, device: torch.device, measured_by: Selector) -> None:
    """Replace layers' default attention cores by the cores that ``measured_by`` selects, on any device."""
    also = _also(plan, device)
    for module in model.modules():
        if not isinstance(module, SelfAttention) or module.core is not attend or module.layout.axis is not None:
            continue
        queries, keys = (matrix.weight.shape[0] // module.head_dim for matrix in (module.q, module.k))
        if module.sinks is not None or queries == 0 or queries % max(keys, 1):
            continue
        heads = HeadSizes(plan.layout.micro_batch, queries, keys, plan.training.sequence_length, module.head_dim)
        dtype = COMPUTE_DTYPE[plan.training.precision]
        try:
            by, answer = attention(measured_by, heads, dtype, device, also=also)
        except NothingWorksError:
            # No kernel works: torch's error when attention is called gives the reason.
            return
        module.core = Selected(by, answer, (dtype, heads.length))


def _also(plan: Plan, device: torch.device) -> tuple[str, ...]:
    """Return the names of further kernels, besides torch's defaults, that are safe to use with this plan."""
    if device.type != "cuda":
        return ()
    # FlexAttention is not an operator, so recomputation policies between none and full cannot keep its result.
    flex = ("flex",) if set(plan.layout.recompute) <= {"none", "full"} and plan.layout.compile == "none" else ()
    # Newer kernels replace flash in the whole process, which breaks partool's calls of it (windows, documents, cp).
    plain = (
        plan.data.attend != "document"
        and plan.model.window is None
        and not plan.model.sinks
        and plan.layout.mesh.cp == 1
    )
    return (*(newer(device) if plain else ()), *flex)
