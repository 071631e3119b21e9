"""The order of packages, lowest first: a module imports from its own package and from lower ones.

A name stands for a package or a module and for all that is in it; a longer name, such as ``registry.types``, takes its
part out of the package. ``*.describe`` stands for the modules of this name in all packages.
"""

from __future__ import annotations

from collections.abc import Mapping

LAYERS = [
    ["strategies"],
    ["diagnostics"],
    ["spec"],
    ["catalog"],
    ["schedule", "layout"],
    ["plan"],
    ["work"],
    ["cost"],
    ["planner", "replay"],
    ["engines"],
    ["render", "verify"],
    ["launch", "report"],
    ["api"],
    ["cli"],
]
RUNTIME_LAYERS = [
    [
        "__init__",
        "errors",
        "exchanges",
        "frames",
        "groups",
        "hashing",
        "losses",
        "placement",
        "precision",
        "private",
        "pulse",
    ],
    ["stop", "tasks", "threads", "allocator", "torch_internals", "deferral", "fast_tokenizer", "trackers"],
    ["chat", "pieces"],
    ["tokens"],
    ["plan_file", "model", "mesh"],
    ["graph", "building", "data", "hf.patches"],
    ["fp8", "hf"],
    ["fused", "usermodel"],
    ["parallel"],
    ["optim", "telemetry"],
    ["offload"],
    ["checkpoint"],
    ["weights", "host", "resuming"],
    ["adversarial"],
    ["preparation", "merge"],
    ["agent"],
    ["worker", "tune", "trace", "export", "calibrate"],
    ["jobs"],
    ["dry"],
]
KERNEL_LAYERS = [
    ["registry.types", "registry.architectures", "registry.dtypes", "_native"],
    ["gemm.describe", "reductions"],
    ["*.describe"],
    ["registry"],
    ["cases", "device", "direct", "timing", "host", "small"],
    ["fp8"],
    ["gemm", "gemm_a8w8", "adamw", "cross_entropy", "glu", "moe", "norm", "onebit", "rope"],
    ["grouped_gemm", "linear_cross_entropy"],
    ["quantised", "select"],
    ["fp8_linear"],
    ["compiled", "__init__"],
    ["proof"],
    ["modelled"],
    ["offline"],
]


def level_of(module: str, layers: list[list[str]]) -> int | None:
    """Return the layer of a module, counted from 0; None if no layer has it. The first part of its name is ignored."""
    levels = {name: level for level, names in enumerate(layers) for name in names}
    parts = module.split(".")[1:] or ["__init__"]
    for name in (".".join(parts[:2]), f"*.{parts[-1]}", parts[0]):
        if name in levels:
            return levels[name]
    return None


def unit_of(module: str) -> str:
    """Return the package of a module, or the module itself at the top."""
    return module.split(".")[1] if "." in module else "__init__"


def upward(edges: Mapping[str, set[str]], package: str, layers: list[list[str]]) -> list[tuple[str, str]]:
    """Return the imports between a package's rooms that do not lead to a lower layer, as (module, imported module)."""
    found = []
    for module, imported in sorted(edges.items()):
        for other in sorted(imported):
            if module.split(".")[0] == other.split(".")[0] == package and unit_of(module) != unit_of(other):
                level, lower = level_of(module, layers), level_of(other, layers)
                if level is not None and lower is not None and lower >= level:
                    found.append((module, other))
    return found
