"""Code of the runtime that replaces methods or classes of modules: all of it is listed here, with its reason."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import torch
from house import is_patch
from torch import nn

from partool_runtime.hf.patches import Patch, has_patched_forward, patch_forward

ROOT = Path(__file__).parents[3]
RUNTIME = ROOT / "runtime/partool_runtime"
MATHEMATICS = {"hf/patches.py": 1}
"""Where a model's mathematics is changed by replacing a method: modules that are not partool's."""
CONVERSIONS = {"model/norm.py": 1, "model/projection.py": 1, "model/adapter.py": 2, "fp8.py": 1}
"""Where a module becomes one of a subclass: torch's linear layers and norms those of partool, with adapters, and of 8
bits."""
SAME_MATHEMATICS = {
    "parallel/apply.py": 1,  # torch.compile
    "trace.py": 1,  # torch.compile
    "offload/activations.py": 1,  # saved tensors move to the host
    "dry/layers.py": 1,  # equal layers repeat each other
    "dry/device.py": 2,  # functions of torch.cuda, on no device
    "graph/capture.py": 1,  # while a graph is captured
    "hf/cutting.py": 2,  # while the shape of a result is asked
    "hf/building.py": 2,  # while a model is built
    "telemetry/_collectives.py": 2,  # while calls of torch.distributed are counted
    "torch_internals/tensors.py": 1,  # while tensors are fake
    "torch_internals/tracing.py": 2,  # while a graph is captured
}
DATA = {
    "preparation.py": 1,  # buffers
    "offload/parameters.py": 1,  # parameters
    "parallel/tensor/apply.py": 1,  # parameters
    "parallel/expert/apply.py": 1,  # parameters
    "parallel/tensor/hf_heads.py": 1,  # numbers of heads
    "dry/layer_passes.py": 1,  # a record's field of the name forward
    "dry/layer_steps.py": 1,  # the same
}
"""Where an attribute that holds no code is set by a name that only the run knows."""


def counted(folder: Path) -> Counter[str]:
    """Return the number of patches in each file of a folder."""
    found: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "setattr" in text or "forward" in text or "__class__" in text:
            found[str(path.relative_to(folder))] += sum(map(is_patch, ast.walk(ast.parse(text))))
    return +found


def test_no_method_of_a_module_is_replaced_elsewhere() -> None:
    assert counted(RUNTIME) == Counter(MATHEMATICS) + Counter(CONVERSIONS) + Counter(SAME_MATHEMATICS) + Counter(DATA)
    assert len(Patch) <= 5


def test_patches_are_seen(tmp_path: Path) -> None:
    lines = [
        "setattr(module, 'inputs', f)", "module.forward = f", "module.__dict__['forward'] = f", "x.__class__ = Y",
        "x.__class__, found = Y, True",
    ]  # fmt: skip
    (tmp_path / "bad.py").write_text("\n".join(lines))
    (tmp_path / "good.py").write_text("module.inputs = f\nnow.forward = None\nmodule.core = wrapped(module.core)")
    assert counted(tmp_path) == {"bad.py": len(lines)}


def test_a_module_tells_its_patches() -> None:
    module = nn.Linear(2, 3)
    assert not has_patched_forward(module)
    patch_forward(module, Patch.TENSOR, lambda x: x + 1)
    patch_forward(module, Patch.SECOND_PASS, module.forward)
    assert has_patched_forward(module)
    assert module._partool_patches == [Patch.TENSOR, Patch.SECOND_PASS]
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))
