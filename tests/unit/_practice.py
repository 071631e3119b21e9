"""Plans of models and machines whose training is published: ``python tests/unit/_practice.py`` writes the record anew.

The record holds the chosen layout, its tier and its price, and the price of the textbook layout where another is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partool.plan.layout import Layout
from partool.planner.evidence import margin, tier_of
from partool.planner.explain.summary import summary
from partool.planner.resolve import resolve
from partool.planner.search.solve import solve
from partool.spec import load_text

RECORD = Path(__file__).parent / "golden" / "practice.json"
_405B = "{layers: 126, hidden: 16384, ffn_hidden: 53248, heads: 128, kv_heads: 8, vocab: 128256, max_position: 131072}"


def _sharded(layout: Layout) -> bool:
    return layout.mesh.tp * layout.mesh.pp * layout.mesh.cp == 1 and layout.data.zero >= 1 and not layout.offload.active


def _megatron(layout: Layout) -> bool:
    mesh = layout.mesh
    return 1 < mesh.tp <= 8 and mesh.pp > 1 and mesh.cp == 1 and layout.data.zero <= 1 and not layout.offload.active


def _experts(layout: Layout) -> bool:
    return layout.expert > 1 and layout.mesh.pp > 1 and layout.mesh.cp == 1 and not layout.offload.active


def _optimizer_on_host(layout: Layout) -> bool:
    offload = layout.offload
    return offload.optimizer == "cpu" and offload.parameters == "none" and offload.activations == "none"


@dataclass(frozen=True)
class Case:
    """A model on machines, and what is published about training it there."""

    model: str
    hardware: str
    sequence_length: int
    global_batch: int
    practice: str
    """Layout of published runs, with its source."""
    agrees: Callable[[Layout], bool]
    """Returns True for layouts of the published form."""
    long: bool = False
    """True if planning takes too long for every CI run."""

    @property
    def text(self) -> str:
        """The spec, with the whole layout open."""
        training = f"{{sequence_length: {self.sequence_length}, global_batch: {self.global_batch}, steps: 10000}}"
        return f"model: {self.model}\nhardware: {self.hardware}\ndata: python-stdlib\ntraining: {training}\n"


def _h100(nodes: int) -> str:
    return f"{{accelerator: h100-sxm, nodes: {nodes}}}"


_FSDP = "FSDP2 over all ranks (torchtitan, docs of its benchmarks: Llama 3.1 8B on 8 and 128 H100)"
_TITAN = (
    "FSDP2 over 32 ranks times tensor 8 on 256 H100 (torchtitan); tensor 8 and pipelines on 768 (Megatron-LM README)"
)
_LLAMA3 = "tensor 8, pipeline 16, data 64 to 128 on 8,192 to 16,384 H100, 38 to 43 % MFU (arXiv 2407.21783, table 4)"
CASES = {
    "llama3-8b on 8 H100": Case("llama3-8b", _h100(1), 8192, 64, _FSDP, _sharded),
    "llama3-8b on 64 H100": Case("llama3-8b", _h100(8), 8192, 512, _FSDP, _sharded, long=True),
    "llama3-70b on 64 H100": Case(
        "llama3-70b", _h100(8), 8192, 512, "tensor 4, pipeline 4, sequence 2 in FP8 (NVIDIA NeMo 24.07)", _megatron
    ),
    "llama3-70b on 256 H100": Case("llama3-70b", _h100(32), 8192, 1024, _TITAN, _megatron, long=True),
    "llama3-70b on 1,024 H100": Case("llama3-70b", _h100(128), 8192, 1024, _TITAN, _megatron, long=True),
    "llama3-405b on 1,024 H100": Case(_405B, _h100(128), 8192, 2048, _LLAMA3, _megatron, long=True),
    "llama3-405b on 16,384 H100": Case(_405B, _h100(2048), 8192, 2048, _LLAMA3, _megatron, long=True),
    "qwen3-32b on 8 H200": Case(
        "qwen3-32b", "{accelerator: h200}", 4096, 64, "ZeRO-3 on one node of 8 (HF TRL pull request 6846)",
        _sharded,
    ),
    "mixtral-8x7b on 64 H100": Case(
        "mixtral-8x7b", _h100(8), 4096, 512, "expert 8, pipeline 4, tensor 1 (NeMo recipes, from memory)", _experts
    ),
    "deepseek-v3 on 2,048 H100": Case(
        "deepseek-v3", _h100(256), 4096, 15360, "pipeline 16, expert 64, ZeRO-1 (arXiv 2412.19437, section 3.2)",
        _experts, long=True,
    ),
    "llama2-7b on an RTX 4090": Case(
        "llama2-7b", "{accelerator: rtx-4090, per_node: 1}", 4096, 16,
        "optimizer in host memory (ZeRO-Offload, arXiv 2101.06840: 13B on one 32 GB device)", _optimizer_on_host,
    ),
    "llama3-8b on a GH200": Case(
        "llama3-8b", "{accelerator: gh200-96, per_node: 1}", 4096, 16,
        "optimizer in Grace's memory (SuperOffload, ASPLOS 2026)", _optimizer_on_host,
    ),
}  # fmt: skip


def record_of(case: Case) -> dict[str, Any]:
    """Plan a case; return the layout, its tier and price, and those of the textbook layout where it is not taken."""
    spec = load_text(case.text).spec
    assert spec is not None
    problem = resolve(spec, Path("/nonexistent")).problem
    assert problem is not None
    solution = solve(problem)
    best, textbook = solution.chosen, solution.tiered.textbook
    assert best is not None
    tokens = case.sequence_length * case.global_batch / best.time.step_time_s / problem.world_size
    found: dict[str, Any] = {
        "practice": case.practice,
        "layout": summary(best.layout),
        "agrees": case.agrees(best.layout),
        "tier": tier_of(best.layout, frozenset()),
        "step_time_s": best.time.step_time_s,
        "tokens_per_s_per_device": tokens,
        "mfu": best.time.mfu,
        "memory_bytes": best.memory.total_bytes,
    }
    if textbook is not None and textbook is not best:
        found |= {"textbook": summary(textbook.layout), "textbook_step_time_s": textbook.time.step_time_s}
        found |= {"needed_gain": margin(best.layout, textbook.layout)}
    return found


if __name__ == "__main__":
    from _golden import fixed_machine

    with fixed_machine():
        found = {name: record_of(case) for name, case in CASES.items()}
    RECORD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
