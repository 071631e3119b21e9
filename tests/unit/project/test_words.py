"""Names say what they hold (docs/design/words.md)."""

from __future__ import annotations

from pathlib import Path

import house
from words import VAGUE, assigned, package_of, vague_names

ROOT = Path(__file__).parents[3]
LEFT: dict[str, int] = {
    "partool.plan": 3,
    "partool_kernels.adamw": 2,
    "partool_kernels.compiled": 2,
    "partool_kernels.cross_entropy": 18,
    "partool_kernels.device": 2,
    "partool_kernels.fp8": 5,
    "partool_kernels.gemm": 2,
    "partool_kernels.gemm_a8w8": 2,
    "partool_kernels.grouped_gemm": 2,
    "partool_kernels.host": 13,
    "partool_kernels.linear_cross_entropy": 5,
    "partool_kernels.modelled": 4,
    "partool_kernels.moe": 1,
    "partool_kernels.norm": 9,
    "partool_kernels.offline": 1,
    "partool_kernels.onebit": 2,
    "partool_kernels.proof": 3,
    "partool_kernels.reductions": 2,
    "partool_kernels.registry": 30,
    "partool_kernels.rope": 5,
    "partool_kernels.select": 9,
    "partool_kernels.small": 1,
    "partool_runtime.adversarial": 1,
    "partool_runtime.building": 1,
    "partool_runtime.calibrate": 16,
    "partool_runtime.data": 12,
    "partool_runtime.export": 1,
    "partool_runtime.fp8": 4,
    "partool_runtime.fused": 5,
    "partool_runtime.graph": 35,
    "partool_runtime.groups": 3,
    "partool_runtime.hf": 49,
    "partool_runtime.jobs": 7,
    "partool_runtime.mesh": 1,
    "partool_runtime.model": 19,
    "partool_runtime.pieces": 1,
    "partool_runtime.placement": 1,
    "partool_runtime.plan_file": 1,
    "partool_runtime.pulse": 4,
    "partool_runtime.telemetry": 20,
    "partool_runtime.torch_internals": 16,
    "partool_runtime.trace": 8,
    "partool_runtime.tune": 16,
    "partool_runtime.usermodel": 12,
    "partool_runtime.weights": 3,
}
"""How often packages that were not renamed yet assign vague names. A number only becomes smaller, down to no entry."""


def test_no_vague_names_are_added_and_the_list_shrinks() -> None:
    counts = {package: names.total() for package, names in sorted(vague_names(house.modules(ROOT)).items())}
    assert counts == LEFT


def test_vague_names_are_seen_wherever_they_are_assigned(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "found = 1\ndef known(own, *, whole=1): pass\nclass There:\n    held: int\n"
        "for left in []: pass\nx.told = 2\n_done = [again for again in []]\nplain = found.coming\n"
    )
    names = {name.lstrip("_") for name in assigned(file)} & VAGUE
    assert names == {"found", "known", "own", "whole", "held", "left", "told", "done", "again"}
    assert package_of("partool.cost.memory.peak") == "partool.cost.memory"
    assert package_of("partool.launch.slurm.logs") == "partool.launch"
