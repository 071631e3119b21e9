"""Trains an adapter with PEFT and torch's AdamW, from the values in a folder, and saves it; prints the losses."""

from __future__ import annotations

import json
import os
import sys

sys.path.append(os.environ["PARTOOL_PEERS"])  # behind the packages that partool has, too

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from partool_runtime.hf.numerics import stay_wide


def main(base: str, adapter: str, batches: str, out: str) -> None:
    """Train the adapter of a model in float64, whose rotary tables are wide, too, on a step for each batch."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for module in (model.model, *model.model.layers):
        stay_wide(module)
    tuned = PeftModel.from_pretrained(model, adapter, is_trainable=True, autocast_adapter_dtype=False).double().train()
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    losses = []
    with open(batches, encoding="utf-8") as file:
        for tokens, labels in json.load(file):
            optimizer.zero_grad()
            logits = tuned(torch.tensor(tokens)).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten())
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    tuned.save_pretrained(out)
    print(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
