"""Loads an exported adapter with PEFT, makes another one and saves it, and prints the logits of both as JSON."""

from __future__ import annotations

import json
import os
import sys

sys.path.append(os.environ["PARTOOL_PEERS"])  # behind the packages that partool has, too

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def main(base: str, adapter: str, out: str) -> None:
    """Print the logits of the model in ``base`` with ``adapter``, and with the adapter that is saved in ``out``."""
    tokens = torch.arange(14).view(2, 7)
    gpt2, experts = base.endswith("gpt2"), base.endswith("experts")
    model = PeftModel.from_pretrained(loaded(base), adapter, autocast_adapter_dtype=False).double().eval()
    torch.manual_seed(1)
    config = LoraConfig(
        r=3, lora_alpha=5.0, init_lora_weights=False,
        target_modules=["c_attn", "c_fc"] if gpt2 else ["q_proj"] if experts else ["q_proj", "down_proj"],
        use_rslora=True, fan_in_fan_out=gpt2, task_type="CAUSAL_LM",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if experts else None,
    )  # fmt: skip
    other = get_peft_model(loaded(base), config, autocast_adapter_dtype=False).double().eval()
    other.save_pretrained(out)
    with torch.no_grad():
        print(json.dumps({"exported": model(tokens).logits.tolist(), "saved": other(tokens).logits.tolist()}))


def loaded(base: str) -> torch.nn.Module:
    """Return the model in a folder, in float64."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
