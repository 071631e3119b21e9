"""Attention of whole sequences on GPUs: which of torch's kernels is the fastest for a rank's heads is measured."""

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
    """The core of attention by a kernel that was chosen; what only some tokens see goes the usual way."""

    def __init__(self, by: Attend, answer: Answer, of: tuple[torch.dtype, int]) -> None:
        """Take it, how it was found, and the type and length that it was measured with: it may not do others."""
        self._by, self._of = by, of
        self.answer = answer

    def __call__(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        tokens: Tokens | None = None,
    ) -> torch.Tensor:
        """Do what :func:`partool_runtime.model.attention.attend` does."""
        windowed = layout.window is not None and layout.window < k_BKSD.shape[2]
        other = layout.axis is not None or (q_BNSD.dtype, q_BNSD.shape[2]) != self._of
        if other or windowed or (tokens is not None and tokens.documents_BL is not None):
            return attend(q_BNSD, k_BKSD, v_BKSD, layout, tokens)
        return self._by(q_BNSD, k_BKSD, v_BKSD)


def select_attention(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Measure, and put what was chosen in the place of layers' cores, where these are torch's: on CUDA and ROCm.

    Layers whose tokens or products are cut otherwise keep what they have: sequence parallelism, two-dimensional tensor
    parallelism, types wider than 16 bits. Training that has to give the same bits again measures nothing, and neither
    does ``kernels.mode: torch``.
    """
    narrow = COMPUTE_DTYPE[plan.training.precision] in (torch.float16, torch.bfloat16)
    wanted = device.type == "cuda" and plan.kernels.mode != "torch" and not plan.training.deterministic
    if wanted and narrow and plan.layout.tensor.inner == 1:
        put(model, plan, device, selector(device))
        # What was measured with is not left in the allocator's hands, in pieces of sizes that nothing else has.
        torch.cuda.empty_cache()


def put(model: nn.Module, plan: Plan, device: torch.device, measured_by: Selector) -> None:
    """Do so with a selector, on any device."""
    also = _also(plan, device)
    for module in model.modules():
        if not isinstance(module, SelfAttention) or module.core is not attend or module.layout.axis is not None:
            continue
        queries, keys = (matrix.weight.shape[0] // module.head_dim for matrix in (module.q, module.k))
        if queries == 0 or queries % max(keys, 1):
            continue
        heads = HeadSizes(plan.layout.micro_batch, queries, keys, plan.training.sequence_length, module.head_dim)
        dtype = COMPUTE_DTYPE[plan.training.precision]
        try:
            by, answer = attention(measured_by, heads, dtype, device, also=also)
        except NothingWorksError:
            # torch says itself what it misses when it is called.
            return
        module.core = Selected(by, answer, (dtype, heads.length))


def _also(plan: Plan, device: torch.device) -> tuple[str, ...]:
    """Return the names besides torch's own kernels that change nothing else."""
    if device.type != "cuda":
        return ()
    # FlexAttention is no operator whose result policies between none and full could keep.
    flex = ("flex",) if set(plan.layout.recompute) <= {"none", "full"} and plan.layout.compile == "none" else ()
    # What takes flash's place in the process must not meet our own calls of it, for windows, documents and sequences.
    whole = plan.data.attend != "document" and plan.model.window is None and plan.layout.mesh.cp == 1
    return (*(newer(device) if whole else ()), *flex)
