"""Plans of models and machines whose training is published: ``python tests/unit/_practice.py`` writes the record anew.

The record holds the chosen layout with its price, its score and its chance to fit, and the best layout with the degrees
of the published practice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partool.plan.layout import Layout
from partool.planner.evidence import tier_of
from partool.planner.explain.summary import summary
from partool.planner.resolve import resolve
from partool.planner.search.solve import Solution, solve
from partool.spec import load_text

RECORD = Path(__file__).parent / "golden" / "practice.json"
_70B_LONG = "{preset: llama3-70b, max_position: %d}"
_LONG = "tensor 8 with sequence 4 to 16 (NVIDIA NeMo's long-context recipes; Llama 3, arXiv 2407.21783, table 4)"
_405B = "{layers: 126, hidden: 16384, ffn_hidden: 53248, heads: 128, kv_heads: 8, vocab: 128256, max_position: 131072}"


def _sharded(layout: Layout) -> bool:
    return layout.mesh.tp * layout.mesh.pp * layout.mesh.cp == 1 and layout.data.zero >= 1 and not layout.offload.active


def _megatron(layout: Layout) -> bool:
    mesh = layout.mesh
    return 1 < mesh.tp <= 8 and mesh.pp > 1 and mesh.cp == 1 and layout.data.zero <= 1 and not layout.offload.active


def _experts(layout: Layout) -> bool:
    return layout.expert > 1 and layout.mesh.pp > 1 and layout.mesh.cp == 1 and not layout.offload.active


def _pipelined(layout: Layout) -> bool:
    return layout.mesh.pp > 1 and layout.mesh.tp == 1 and not layout.offload.active


def _sequence(layout: Layout) -> bool:
    return layout.mesh.cp > 1 and not layout.offload.active


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
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Columns of :class:`partool.cost.case.Layouts` with the degrees of practice."""
    why_not: str = ""
    """Why the plan has another form than practice; empty where it has this form."""
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
_NO_ERROR = "ZeRO-3 alone is predicted to be as fast or faster, and has no error of tensor or pipeline ranks"
_GATHERED = "ZeRO-3 that gathers all experts is predicted to be faster than expert ranks on pipelines"
_DEEPSEEK = "pipeline 16, expert 64, ZeRO-1 (arXiv 2412.19437, section 3.2)"
_IBM = "FSDP over all ranks for 7B to 70B (IBM's fms-fsdp)"
_FEW = "optimizer in host memory (ZeRO-Offload, arXiv 2101.06840)"
_LLAMA3 = "tensor 8, pipeline 16, data 64 to 128 on 8,192 to 16,384 H100, 38 to 43 % MFU (arXiv 2407.21783, table 4)"
CASES = {
    "llama3-8b on 8 H100": Case("llama3-8b", _h100(1), 8192, 64, _FSDP, _sharded),
    "llama3-8b on 64 H100": Case("llama3-8b", _h100(8), 8192, 512, _FSDP, _sharded, long=True),
    "llama3-70b on 64 H100": Case(
        "llama3-70b", _h100(8), 8192, 512, "tensor 4, pipeline 4, sequence 2 in FP8 (NVIDIA NeMo 24.07)", _megatron,
        {"tp": 4, "pp": 4}, _NO_ERROR,
    ),
    "llama3-70b on 256 H100": Case(
        "llama3-70b", _h100(32), 8192, 1024, _TITAN,
        _megatron, {"tp": 8, "pp": 1}, _NO_ERROR, long=True,
    ),
    "llama3-70b on 1,024 H100": Case(
        "llama3-70b", _h100(128), 8192, 1024, _TITAN,
        _megatron, {"tp": 8, "pp": 1}, _NO_ERROR, long=True,
    ),
    "llama3-405b on 1,024 H100": Case(
        _405B, _h100(128), 8192, 2048, _LLAMA3,
        _megatron,
        {"tp": 8, "pp": 16, "cp": 1},
        "ZeRO-3 with activations in host memory is predicted to be faster by more than its error", long=True,
    ),
    "llama3-405b on 16,384 H100": Case(
        _405B, _h100(2048), 8192, 2048, _LLAMA3,
        _megatron, {"tp": 8, "pp": 16, "cp": 1}, long=True,
    ),
    "qwen3-32b on 8 H200": Case(
        "qwen3-32b", "{accelerator: h200}", 4096, 64, "ZeRO-3 on one node of 8 (HF TRL pull request 6846)",
        _sharded,
    ),
    "mixtral-8x7b on 64 H100": Case(
        "mixtral-8x7b", _h100(8), 4096, 512, "expert 8, pipeline 4, tensor 1 (NeMo recipes, from memory)", _experts,
        {"ep": 8, "pp": 4, "tp": 1}, _GATHERED,
    ),
    "deepseek-v3 on 2,048 H100": Case(
        "deepseek-v3", _h100(256), 4096, 15360, _DEEPSEEK, _experts, {"pp": 16, "ep": 64, "tp": 1}, _GATHERED, long=True
    ),
    "llama2-7b on an RTX 4090": Case(
        "llama2-7b", "{accelerator: rtx-4090, per_node: 1}", 4096, 16,
        "optimizer in host memory (ZeRO-Offload, arXiv 2101.06840: 13B on one 32 GB device)", _optimizer_on_host,
    ),
    "llama3-8b on a GH200": Case(
        "llama3-8b", "{accelerator: gh200-96, per_node: 1}", 4096, 16,
        "optimizer in Grace's memory (SuperOffload, ASPLOS 2026)", _optimizer_on_host,
    ),
    "llama3-8b on 8 A100": Case(
        "llama3-8b", "{accelerator: a100-80}", 4096, 128, "FSDP over all ranks (MosaicML llm-foundry, 7B on 8 A100)",
        _sharded,
    ),
    "llama3-8b on 64 A100 over 25 Gb Ethernet": Case(
        "llama3-8b", "{accelerator: a100-80, nodes: 8, fabric: ethernet-25g}", 4096, 256,
        "no published run on such a network; pipelines send least", _pipelined, {"tp": 1, "pp": 1, "cp": 1}, long=True,
    ),
    "qwen3-30b-a3b on 8 H100": Case(
        "qwen3-30b-a3b", _h100(1), 4096, 256, "expert 8, tensor 1, pipeline 1 (NVIDIA recipes, from memory)",
        _experts,
        {"ep": 8, "tp": 1, "pp": 1},
        "ZeRO-3 with the optimizer in host memory is predicted to be faster by more than its error",
    ),
    "qwen3-32b on 64 H100": Case("qwen3-32b", _h100(8), 4096, 512, _IBM, _sharded),
    "llama3-70b on 16 H100": Case("llama3-70b", _h100(2), 8192, 128, _FEW, _optimizer_on_host, long=True),
    "llama3-70b on 8 MI300X": Case(
        "llama3-70b", "{accelerator: mi300x}", 8192, 64, _FEW,
        _optimizer_on_host,
    ),
    "llama3-70b on 64 MI355X": Case(
        "llama3-70b", "{accelerator: mi355x, nodes: 8}", 8192, 512, "FSDP over all ranks (AMD Primus, from memory)",
        _sharded,
    ),
    "llama3-70b at 128k on 512 H100": Case(
        _70B_LONG % 131072, _h100(64), 131072, 128, _LONG, _sequence, {"tp": 8, "cp": 4}, long=True
    ),
    "llama3-70b at 1M on 512 H100": Case(
        _70B_LONG % 1048576, _h100(64), 1048576, 16, _LONG, _sequence, {"tp": 8, "cp": 16}, long=True
    ),
    "qwen3-235b-a22b on 256 H100": Case(
        "qwen3-235b-a22b", _h100(32), 4096, 2048, "tensor 2, pipeline 8, expert 32 (NVIDIA recipes, from memory)",
        _experts,
        {"tp": 2, "pp": 8, "ep": 32}, _GATHERED, long=True,
    ),
    "deepseek-v3 on 2,048 H800": Case(
        "deepseek-v3", "{accelerator: h800, nodes: 256}", 4096, 15360, _DEEPSEEK,
        _experts,
        {"pp": 16, "ep": 64, "tp": 1}, _GATHERED, long=True,
    ),
    "llama3-405b on 256 GB200": Case(
        _405B, "{accelerator: gb200, nodes: 64}", 8192, 512,
        "FSDP, or tensor 4 and pipeline 8 (NVIDIA recipes, from memory)", _sharded, {"tp": 4, "pp": 8}, long=True,
    ),
    "llama3-8b on 4 RTX 4090": Case(
        "llama3-8b", "{accelerator: rtx-4090, per_node: 4}", 4096, 64, _FEW, _optimizer_on_host,
        {"tp": 1, "pp": 1, "cp": 1}, "activations in host memory beside it are predicted to gain more than they err",
    ),
}  # fmt: skip


def record_of(case: Case) -> dict[str, Any]:
    """Plan a case; return the layout with its price and score, and those of the layout with practice's degrees."""
    spec = load_text(case.text).spec
    assert spec is not None
    problem = resolve(spec, Path("/nonexistent")).problem
    assert problem is not None
    solution = solve(problem)
    best = solution.chosen
    assert best is not None
    tokens = case.sequence_length * case.global_batch / best.time.step_time_s / problem.world_size
    return {
        "practice": case.practice,
        "layout": summary(best.layout),
        "agrees": case.agrees(best.layout),
        "why_not": case.why_not,
        "tier": tier_of(best.layout, frozenset()),
        "step_time_s": best.time.step_time_s,
        "score_s": best.score_s,
        "risk": best.risk,
        "fit_probability": best.memory.fit_probability,
        "tokens_per_s_per_device": tokens,
        "mfu": best.time.mfu,
        "memory_bytes": best.memory.total_bytes,
        **_of_practice(case, solution),
    }


def _of_practice(case: Case, solution: Solution) -> dict[str, Any]:
    """Return the layout of practice's degrees with the least score, if the case names degrees and one fits."""
    groups, size = solution.space.groups, solution.space.size
    if not case.degrees:
        return {}
    masks = [
        np.broadcast_to(np.asarray(getattr(groups, name)) == degree, size) for name, degree in case.degrees.items()
    ]
    policies = solution.space.policies
    stays = (policies.gpu_fraction == 1.0) & (policies.parameters == 0) & (policies.activations == 0)
    result = solution.without(np.logical_and.reduce(masks), stays)
    priced = None if result is None else result.best
    if priced is None:
        return {"practice_layout": "does not fit"}
    return {
        "practice_layout": summary(priced.layout),
        "practice_step_time_s": priced.step_time_s,
        "practice_score_s": priced.score_s,
    }


if __name__ == "__main__":
    from _golden import fixed_machine

    with fixed_machine():
        found = {name: record_of(case) for name, case in CASES.items()}
    RECORD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
