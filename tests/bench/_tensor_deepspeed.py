"""A Hugging Face model under DeepSpeed's AutoTP, whose engine makes the step.

https://www.deepspeed.ai/tutorials/autotp-training/; DeepSpeed is needed for this measurement only, and found on a path
that the job names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from partool.plan.types import Plan
from partool_runtime.data.batches import IGNORED_LABEL, MicroBatch


def deepspeed_step(plan: Plan, folder: str, *, overlap: bool) -> Callable[[int, Sequence[MicroBatch]], float]:
    """Return a step of the model in ``folder`` on all ranks of the world; ``overlap`` is its ``tp_overlap_comm``."""
    import deepspeed

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    spec = plan.optimizer
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (spec.betas[0], spec.betas[1])
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=spec.lr, betas=betas, eps=spec.eps, fused=True),
        config={
            "train_micro_batch_size_per_gpu": plan.layout.micro_batch,
            "gradient_accumulation_steps": plan.layout.derived.accumulation,
            "gradient_clipping": spec.clip,
            "tensor_parallel": {"autotp_size": dist.get_world_size(), "tp_overlap_comm": overlap},
            "zero_optimization": {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )

    def step(number: int, batch: Sequence[MicroBatch]) -> float:
        total = 0.0
        for micro in batch:
            logits_BSV = engine(micro.tokens_BS, use_cache=False).logits
            # DeepSpeed's mean over micro-batches equals the mean over tokens: all have the same number of tokens.
            loss = F.cross_entropy(logits_BSV.flatten(0, -2), micro.labels_BS.flatten(), ignore_index=IGNORED_LABEL)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(batch)
        return total

    return step
