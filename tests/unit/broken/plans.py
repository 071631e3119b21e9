"""Edits of a plan's file after which the plan contradicts itself."""

from __future__ import annotations

from typing import Any

PLANNED = """\
model: {layers: 4, hidden: 64, heads: 4, kv_heads: 2, ffn_hidden: 192, vocab: 256, max_position: 128}
hardware: {accelerator: cpu, per_node: 4}
training: {sequence_length: 128, global_batch: 16, precision: fp32}
data: python-stdlib
parallel:
  tensor: 2
  pipeline: {stages: 2, schedule: 1f1b}
  compile: none
  micro_batch: 2
"""
EDITS: list[tuple[str, dict[str, Any], str]] = [
    ("DeepSpeed #2898: the same run on fewer GPUs", {"devices.per_node": 2}, "layout make 4 ranks, devices are 2"),
    ("nanotron #106: another tensor degree", {"layout.tensor.degree": 4}, "layout make 8 ranks, devices are 4"),
    (
        "DeepSpeed #17: train_batch == micro_batch * accumulation * world_size should always hold",
        {"layout.micro_batch": 3}, "training.global_batch is 16",
    ),
    ("AnomalyGPT #19: 16 != 1 * 8 * 1", {"training.global_batch": 15}, "training.global_batch is 15"),
    (
        "Megatron-LM #1778: num-layers beside other layers per stage",
        {"model.layers": 5}, "layout.pipeline.layers names 4 layers, the model has 5",
    ),
    (
        "Megatron-LM #857: layers per stage by hand",
        {"layout.pipeline.layers": [1, 1, 2]}, "names 3 stages, stages × chunks are 2",
    ),
    (
        "pytorch #143599: a zero-bubble schedule with compiled stages crashes",
        {"layout.pipeline.schedule": "zb-h1", "layout.compile": "block"}, "zb-h1 splits backward passes",
    ),
    ("another schedule than the planned one", {"layout.pipeline.schedule": "gpipe"}, "gpipe is not the planned one"),
    ("a schedule that does not exist", {"layout.pipeline.schedule": "1f1bb"}, "1f1bb, an unknown schedule"),
    (
        "torchtitan #2577: key and value heads that the heads do not share",
        {"model.kv_heads": 3}, "model.heads is 4, no multiple of model.kv_heads: 3",
    ),
    (
        "autotrain #487: matrices of another width than the ranks' shares",
        {"model.ffn_hidden": 190}, "partition has layers.0.ffn.gate.weight of [192, 64], the model of [190, 64]",
    ),
    ("shares of no parameter", {"partition": []}, "partition lacks embed.weight"),
    (
        "esm #49: learned positions, and a longer sequence",
        {"model.position": "learned", "model.max_position": 64}, "sequence_length is 128, model.max_position 64",
    ),
    ("wenet #2499: offload_param without parameter shards", {"layout.offload.parameters": "cpu"}, "needs zero: 3"),
    ("accelerate #1463: nvme, but nowhere to write", {
        "layout.offload.optimizer": "nvme", "layout.offload.gpu_fraction": 0.0,
    }, "names no dir for files"),
    ("parts of experts without expert parallelism", {"layout.expert_tensor": 2}, "expert_tensor is 2 with expert: 1"),
    (
        "tokens by node without expert parallelism",
        {"layout.expert_exchange": "node_first"}, "expert_exchange is node_first with expert: 1",
    ),
    ("experts of a model that has none", {"layout.expert": 2}, "the model has no experts"),
    (
        "a plan that cannot run, made runnable by hand",
        {"not_runnable": ["PT405"]}, "runnable is true, and not_runnable names PT405",
    ),
    ("FR-UNet #10: a number as text", {"optimizer.lr": "1e-4"}, "`optimizer.lr`: Input should be a valid number"),
    ("Soup #627: a key that does not exist yet", {"layout.tensr": 2}, "`layout.tensr`: Extra inputs are not permitted"),
    ("a plan of another version", {"plan_version": 1}, "is a plan of version 1"),
]  # fmt: skip
"""Why, the edits as dotted name → value, and a part of the message."""
