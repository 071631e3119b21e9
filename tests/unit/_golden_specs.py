"""Awkward specs whose plans are recorded in ``golden/plans.json``: a base, and settings changed in it.

Sizes do not divide, layouts are pinned in odd ways, memory is short, or nothing fits.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

SPECS = Path(__file__).parents[2] / "specs"

_TOKENS = {"source": "/data/tokens/*.bin", "format": "tokens"}
_CPU = {
    "model": {"layers": 6, "hidden": 60, "ffn_hidden": 172, "heads": 6, "kv_heads": 2, "vocab": 259,
              "max_position": 128},
    "hardware": {"accelerator": "cpu", "per_node": 4, "memory_gib": 16},
    "training": {"sequence_length": 126, "global_batch": 24, "precision": "fp32", "steps": 10},
    "data": {"source": "python-stdlib"},
}  # fmt: skip
_NODE = {
    "model": {"preset": "llama3-8b"},
    "hardware": {"accelerator": "h100-sxm", "per_node": 8},
    "training": {"sequence_length": 8192, "global_batch": 64, "steps": 100},
    "data": _TOKENS,
}
_NODES = _NODE | {"hardware": {"accelerator": "h100-sxm", "nodes": 4, "per_node": 8, "fabric": "ib-ndr"}}
_SUPERCHIP = {
    "model": {"preset": "mistral-7b"},
    "hardware": {"accelerator": "gh200-96", "per_node": 1},
    "training": {"sequence_length": 4096, "global_batch": 16, "steps": 100},
    "data": _TOKENS,
}
_EXPERTS = {
    "model": {"preset": "mixtral-8x7b"},
    "hardware": {"accelerator": "h200", "nodes": 4, "per_node": 8},
    "training": {"sequence_length": 4096, "global_batch": 256, "steps": 100},
    "data": _TOKENS,
}
_VIDEO = {
    "model": {
        "layers": 6, "hidden": 192, "ffn_hidden": 512, "heads": 6, "vocab": 256, "max_position": 864,
        "attention": {"grid": [24, 36], "layer_types": {"pattern": ["row", "column"]}},
    },
    "hardware": {"accelerator": "cpu", "per_node": 4, "memory_gib": 16},
    "training": {"sequence_length": 864, "global_batch": 8, "precision": "fp32", "steps": 10},
    "data": {"source": "python-stdlib"},
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Everything open.
    "cpu-open": (_CPU, {}),
    "cpu-three-ranks": (_CPU, {"hardware.per_node": 3}),
    "cpu-one-rank-fp64": (_CPU, {"hardware.per_node": 1, "training.precision": "fp64"}),
    "cpu-batch-prime": (_CPU, {"training.global_batch": 23}),
    "node-open": (_NODE, {}),
    "nodes-open": (_NODES, {}),
    "node-short-batch": (_NODE, {"training.global_batch": 4}),
    "node-long-sequence": (_NODE, {"training.sequence_length": 131072, "model.max_position": 131072,
                                   "training.global_batch": 8, "parallel.sequence": "auto"}),
    "superchip-open": (_SUPERCHIP, {}),
    "experts-open": (_EXPERTS, {}),
    "video-open": (_VIDEO, {}),
    # ZeRO and its gathers.
    "zero-0": (_CPU, {"parallel.data.zero": 0, "parallel.tensor": 1}),
    "zero-1": (_CPU, {"parallel.data.zero": 1, "parallel.tensor": 1}),
    "zero-2": (_CPU, {"parallel.data.zero": 2, "parallel.micro_batch": 3, "parallel.tensor": 1}),
    "zero-3": (_CPU, {"parallel.data.zero": 3, "parallel.micro_batch": 2, "parallel.recompute": "full"}),
    "hybrid-shards": (_CPU, {"parallel.data": {"zero": 3, "shard": 2}}),
    "gather-in-turn": (_NODE, {"parallel.data": {"zero": 3, "gather": "sequential", "prefetch": 0,
                                                 "persistent": 10000}}),
    "gather-ahead": (_NODE, {"parallel.data": {"zero": 3, "prefetch": 3}, "parallel.micro_batch": 1}),
    "leaves": (_EXPERTS, {"parallel.data": {"zero": 3, "leaves": ["*.experts"]}}),
    # Recomputation and tiles.
    "recompute-each-layer": (_CPU, {"parallel.recompute": ["full", "none", "selective", "attention", "none", "full"]}),
    "recompute-keep-attention": (_NODE, {"parallel.recompute": "keep_attention"}),
    "tiles": (_CPU, {"parallel.tiles": {"mlp": 40, "loss": 32}}),
    "compiled-not": (_NODE, {"parallel.compile": "none"}),
    # Tensor parallelism.
    "tensor-uneven": (_CPU, {"parallel.tensor": 4}),
    "tensor-two-dims": (_CPU, {"model.heads": 8, "model.kv_heads": 4, "model.hidden": 64,
                                "model.ffn_hidden": 176, "parallel.tensor": {"shape": [2, 2], "overlap": "none"}}),
    "tensor-norms": (_NODE, {"parallel.tensor": {"degree": 4, "sequence_norms": True, "overlap": "backward"}}),
    "tensor-chunks": (_NODE, {"parallel.tensor": {"degree": 8, "chunks": 2, "sequence_norms": False},
                              "parallel.compile": "none"}),
    "tensor-patterns": (_CPU, {"parallel.tensor": {"degree": 2, "patterns": {"layers.*.ffn.*": "replicated"}}}),
    "tensor-across-nodes": (_NODES, {"parallel.tensor": 16}),
    # Pipelines.
    "pipeline-gpipe": (_CPU, {"parallel.pipeline": {"stages": 2, "schedule": "gpipe"}}),
    "pipeline-1f1b": (_CPU, {"parallel.pipeline": {"stages": 3, "schedule": "1f1b"}, "hardware.per_node": 3}),
    "pipeline-interleaved": (_CPU, {"parallel.pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 3}}),
    "pipeline-zb-h1": (_CPU, {"parallel.pipeline": {"stages": 2, "schedule": "zb-h1"}}),
    "pipeline-zb-v": (_CPU, {"parallel.pipeline": {"stages": 2, "schedule": "zb-v", "in_flight": 3}}),
    "pipeline-hanayo": (_CPU, {"model.layers": 8, "parallel.pipeline": {"stages": 2, "schedule": "hanayo", "waves": 2},
                               "parallel.micro_batch": 3}),
    "pipeline-weipipe": (_CPU, {"parallel.pipeline": {"stages": 2, "schedule": "weipipe"}}),
    "pipeline-weipipe-naive": (_CPU, {"parallel.pipeline": {"stages": 2, "schedule": "weipipe-naive"}}),
    "pipeline-weipipe-zb": (_CPU, {"parallel.pipeline": {"stages": 2, "schedule": "weipipe-zb"}}),
    "pipeline-stages": (_CPU, {"parallel.pipeline": {"stages": 2, "layers": [2, 4]}, "parallel.data.zero": 2}),
    "pipeline-open-schedule": (_NODES, {"parallel.pipeline": 4, "parallel.tensor": 2}),
    # Sequence parallelism.
    "sequence-ulysses": (_CPU, {"parallel.sequence": {"degree": 4, "method": "ulysses"}}),
    "sequence-ring-zigzag": (_CPU, {"parallel.sequence": {"degree": 4, "method": "ring", "order": "zigzag"}}),
    "sequence-ring-contiguous": (_CPU, {"parallel.sequence": {"degree": 2, "method": "ring", "order": "contiguous"}}),
    "sequence-usp": (_CPU, {"parallel.sequence": {"degree": 4, "method": "usp", "ulysses": 2}}),
    "sequence-startrail": (_CPU, {"parallel.sequence": {"degree": 4, "method": "startrail", "teams": 2,
                                                       "inside": "rings"}}),
    "sequence-all-gather": (_CPU, {"parallel.sequence": {"degree": 2, "method": "all_gather"}}),
    "sequence-dsp": (_VIDEO, {"parallel.sequence": {"degree": 2, "method": "dsp"}}),
    "sequence-window": (_CPU, {"model.attention": {"window": 32}, "parallel.sequence": 2}),
    "sequence-and-all": (_NODES, {"parallel": {"sequence": 2, "tensor": 2, "pipeline": 2, "data": {"zero": 3}}}),
    # Offload.
    "offload-cpu": (_SUPERCHIP, {"parallel.offload": "cpu"}),
    "offload-fraction": (_SUPERCHIP, {"parallel.offload": {"optimizer": "cpu", "gpu_fraction": 0.25,
                                                            "speculate": True}}),
    "offload-undo": (_SUPERCHIP, {"parallel.offload": {"optimizer": "cpu", "speculate": "undo", "undo_gib": 4}}),
    "offload-disks": (_NODE, {"parallel.offload": {"optimizer": "nvme", "dir": "/tmp", "buffers": 5, "bucket_mib": 32},
                              "parallel.data.zero": 3}),
    "offload-parameters": (_NODE, {"parallel.offload": {"parameters": "cpu"}, "parallel.data.zero": 3}),
    "offload-activations": (_NODE, {"parallel.offload": {"activations": "cpu", "optimizer": "none"}}),
    "offload-where-it-is-needed": (_NODE, {"model.preset": "llama3-70b", "parallel.pipeline": 1}),
    "offload-pinned": (_SUPERCHIP, {"parallel.offload": {"optimizer": "cpu", "pinned_gib": 40, "moments": "bf16"}}),
    # Experts, precision, optimizers, devices.
    "experts-pinned": (_EXPERTS, {"parallel.expert": 8, "parallel.data.zero": 1}),
    "fp8": (_NODE, {"training.precision": "fp8"}),
    "fp16": (_NODE, {"training.precision": "fp16", "hardware.accelerator": "a100-80"}),
    "lion": (_NODE, {"optimizer": {"name": "lion"}}),
    "frozen": (_NODE, {"model.frozen": ["embed.*"]}),
    "rocm-mesh": (_NODE, {"hardware.accelerator": "mi300x"}),
    "own-device": (_NODE, {"hardware": {"accelerator": "own", "memory_gib": 40, "peak_tflops": 200,
                                        "memory_gb_per_s": 1000, "topology": "none", "per_node": 3},
                           "model.preset": "llama3.2-1b"}),
    "at-most-five": (_NODE, {"limits": {"max_devices": 5}}),
    # Refused.
    "refused-too-large": (_NODE, {"model.preset": "llama3-70b", "hardware.per_node": 1, "parallel.offload": "none"}),
    "refused-degrees": (_CPU, {"parallel": {"tensor": 3, "pipeline": 2}}),
    "refused-schedule": (_CPU, {"parallel.pipeline": {"stages": 2, "schedule": "zb-v", "chunks": 3}}),
    "refused-pairs": (_CPU, {"parallel": {"pipeline": {"stages": 2, "schedule": "weipipe"}, "sequence": 2}}),
    "refused-dsp": (_CPU, {"parallel.sequence": {"degree": 2, "method": "dsp"}}),
    "refused-symmetric": (_CPU, {"parallel.tensor": {"degree": 2, "overlap": "symmetric"}}),
    "refused-batch": (_CPU, {"parallel.micro_batch": 7}),
    "refused-offload": (_NODE, {"parallel.offload": {"parameters": "cpu"}, "parallel.data.zero": 1}),
}  # fmt: skip


def text_of(name: str) -> tuple[str, Path]:
    """Return the text of a recorded spec, and the folder that its paths start from."""
    if name.startswith("specs/"):
        return (SPECS.parent / name).read_text(encoding="utf-8"), SPECS
    base, changes = CASES[name]
    document: dict[str, Any] = deepcopy({"spec": 1, "name": name} | base)
    for place, value in changes.items():
        *outer, last = place.split(".")
        section = document
        for key in outer:
            section = section.setdefault(key, {})
        section[last] = value
    return yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False), SPECS


def names() -> list[str]:
    """Return the names of all recorded specs."""
    return [*CASES, *sorted(f"specs/{path.name}" for path in SPECS.glob("*.yaml"))]
