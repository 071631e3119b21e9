"""Ranks of test_tensor_hf_patterns.py: models of transformers cut as the spec's patterns say, in float64."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _hf_models import MODELS, write_model
from _hf_worker import FOLDER, Case, check

from partool.layout.tensor import decide
from partool.plan.types import Plan
from partool_runtime.hf.building import build_causal
from partool_runtime.hf.structure import structure_of
from partool_runtime.mesh import close_ranks

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS.update(
    {
        # Transposed matrices, and queries, keys and values behind each other.
        "gpt2": {"n_embd": 20, "n_layer": 2, "n_head": 5, "n_positions": 16, "n_inner": 13, **_NO_DROPOUT},
        # Norms over the width of all heads: its own plan gathers what they read.
        "olmo2": {"hidden_size": 24, "intermediate_size": 13, "num_attention_heads": 6, "num_key_value_heads": 3},
    }
)


@dataclass(frozen=True)
class Cut(Case):
    """A case whose spec has patterns."""

    patterns: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        plan = super().plan()
        decided = decide(structure_of(build_causal(Path(FOLDER / self.model))), self.tp, self.patterns)
        assert not decided.findings, decided.findings
        return plan.model_copy(update={"partition": decided.rows})


def cases(ranks: int) -> list[Cut]:
    """Every style in a place where no rule would put it."""
    gathered = dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj"), "column_gathered")
    return [
        Cut("gpt2", tp=ranks),
        Cut("olmo2", tp=ranks),
        Cut("llama", tp=ranks, patterns={"*.layers.0.mlp": "replicated", "*.layers.1.self_attn.*": "replicated"}),
        Cut("mistral", tp=ranks, patterns=gathered),
        Cut("phi3", tp=ranks, patterns=dict.fromkeys(("*.gate_up_proj", "*.qkv_proj"), "column_gathered")),
        Cut("mixtral", tp=ranks, patterns={"*.experts": "replicated"}),
        Cut("qwen2", tp=ranks, patterns={"lm_head": "replicated"}),
    ]


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    chosen = cases(int(os.environ["WORLD_SIZE"]))
    if int(os.environ["RANK"]) == 0:
        for case in chosen:
            write_model(case.model, FOLDER)
    torch.distributed.barrier()
    for case in chosen:
        check(case)
    close_ranks()


if __name__ == "__main__":
    main()
