"""Computes the losses, figures and gradients of a batch of pairs with TRL's own functions, and saves them.

The model of the batch is a table of logits, so that nothing but the loss differs. DPO: ``DPOTrainer``; ORPO:
``ORPOTrainer``; SimPO, and DPO with smoothing, which TRL's DPO does not have: ``CPOTrainer``.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

sys.path.append(os.environ["PARTOOL_PEERS"])  # behind the packages that partool has, too

import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer

ONE_RANK = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)


class Table(torch.nn.Module):
    """A model whose logits do not depend on its input."""

    def __init__(self, logits_BSV: torch.Tensor) -> None:
        super().__init__()
        self.logits_BSV = logits_BSV.requires_grad_()

    def forward(self, *args: Any, labels: Any = None, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return SimpleNamespace(logits=self.logits_BSV)
        labels_BS = labels[:, 1:]
        kept_BS = labels_BS != -100
        logs_BSV = self.logits_BSV[:, :-1].log_softmax(-1)
        picked_BS = logs_BSV.gather(2, labels_BS.clamp(min=0)[..., None])[..., 0] * kept_BS
        zeros_BS = torch.zeros_like(picked_BS)
        return SimpleNamespace(log_probs=picked_BS, entropy=zeros_BS, mean_logits=zeros_BS, is_top1=zeros_BS.bool())


def made(kind: type, **attributes: Any) -> Any:
    """Return a trainer without what its constructor would load."""
    trainer = object.__new__(kind)
    vars(trainer).update({"accelerator": ONE_RANK, "aux_loss_enabled": False, "label_smoothing": 0.0} | attributes)
    return trainer


def dpo(case: dict[str, Any], model: Table) -> tuple[torch.Tensor, dict[str, float]]:
    """Return TRL's loss of DPO in one of its forms, and its figures."""
    metrics: Any = {"train": defaultdict(list)}
    trainer = made(
        DPOTrainer, model=model, beta=case["beta"], loss_types=[case["form"]], loss_weights=[1.0], ld_alpha=None,
        f_divergence_type="reverse_kl", use_weighting=False, precompute_ref_logps=True, _metrics=metrics,
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    chosen, rejected = case["reference"].chunk(2)
    inputs = {
        "input_ids": case["ids"], "attention_mask": case["attended"], "completion_mask": case["completion"],
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    loss = trainer._compute_loss(model, inputs, False)
    return loss, {name: values[0] for name, values in metrics["train"].items()}


def conservative(case: dict[str, Any], model: Table) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of DPO with smoothing: that of CPO, of log-probabilities relative to the reference."""
    trainer = made(CPOTrainer, beta=case["beta"], loss_type="sigmoid", alpha=0.0, label_smoothing=case["smoothing"])
    labels = case["ids"].masked_fill(case["completion"] == 0, -100)
    ratios = CPOTrainer.get_batch_logps(model().logits, labels) - case["reference"]
    losses, _, _ = trainer.cpo_loss(*ratios.chunk(2))
    return losses.mean(), {}


def concatenated(case: dict[str, Any], kind: type, model: Table, **attributes: Any) -> Any:
    """Return the loss and the figures of a trainer whose batches name chosen and rejected tokens apart."""
    batch: dict[str, torch.Tensor] = {}
    for name, field in (("input_ids", "ids"), ("attention_mask", "attended")):
        batch[f"chosen_{name}"], batch[f"rejected_{name}"] = case[field].chunk(2)
    labels = case["ids"].masked_fill(case["completion"] == 0, -100)
    batch["chosen_labels"], batch["rejected_labels"] = labels.chunk(2)
    trainer = made(kind, is_encoder_decoder=False, padding_value=0, pad_token_id=0, beta=case["beta"], **attributes)
    return trainer.get_batch_loss_metrics(model, batch)


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """Return the loss of a case, its figures, and the gradient of the logits."""
    model = Table(case["logits"])
    if case["kind"] == "dpo":
        loss, figures = (conservative if case["smoothing"] else dpo)(case, model)
    elif case["kind"] == "orpo":
        loss, figures = concatenated(case, ORPOTrainer, model)
    else:
        settings = {"simpo_gamma": case["gamma"], "label_smoothing": case["smoothing"]}
        loss, figures = concatenated(case, CPOTrainer, model, loss_type="simpo", cpo_alpha=0, alpha=0.0, **settings)
    (gradient,) = torch.autograd.grad(loss, model.logits_BSV)
    return {"loss": loss.detach(), "figures": figures, "gradient": gradient}


if __name__ == "__main__":
    cases = torch.load(sys.argv[1])
    torch.save({name: judged(case) for name, case in cases.items()}, sys.argv[2])
