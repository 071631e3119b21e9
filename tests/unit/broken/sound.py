"""Specs that other tools refuse, hang on or get wrong, and that are sound here: none of them may be refused."""

from __future__ import annotations

from broken.case import CPU, SOUND, spec

_CPUS = SOUND | CPU | {"hardware": "{accelerator: cpu, per_node: 4}"}
_MODEL = "{{layers: {}, hidden: 64, heads: {}, kv_heads: {}, vocab: 256, max_position: 128{}}}"


def _here(**sections: str) -> str:
    return spec(_CPUS | sections)


SPECS: list[tuple[str, str]] = [
    (
        "torchtitan #2574: 2 key and value heads on 4 tensor ranks",
        _here(model=_MODEL.format(2, 4, 2, ""), parallel="{tensor: 4, pipeline: 1}"),
    ),
    (
        "Megatron-LM #1304: 6 layers on 4 stages lost two layers",
        _here(
            model=_MODEL.format(6, 4, 4, ""),
            parallel="{tensor: 1, sequence: 1, pipeline: {stages: 4, schedule: 1f1b}}",
        ),
    ),
    (
        "Megatron-LM #468: 10 layers on 2 ranks of 3 virtual stages lost four layers",
        _here(
            model=_MODEL.format(10, 4, 4, ""), hardware="{accelerator: cpu, per_node: 2}",
            parallel="{tensor: 1, sequence: 1, pipeline: {stages: 2, schedule: interleaved, chunks: 3}}",
        ),
    ),
    (
        "torchtitan #775: fewer micro-batches than stages hang",
        _here(
            model=_MODEL.format(4, 4, 4, ""), training="{sequence_length: 128, global_batch: 2, precision: fp32}",
            parallel="{tensor: 1, sequence: 1, micro_batch: 1, pipeline: {stages: 4, schedule: 1f1b}}",
        ),
    ),
    (
        "DeepSpeed #5177, #7384: a sequence that the ranks do not divide",
        _here(
            training="{sequence_length: 101, global_batch: 4, precision: fp32}",
            parallel="{tensor: 1, pipeline: 1, sequence: {method: ulysses, degree: 4}}",
        ),
    ),
    (
        "prime-rl #2828: a sliding window on a ring",
        _here(
            model=_MODEL.format(2, 4, 4, ", attention: {window: 32}"),
            parallel="{tensor: 1, pipeline: 1, sequence: {method: ring, degree: 4}}",
        ),
    ),
    (
        "Model-Optimizer #1302: shards of 2 on 4 ranks leave 2 replicas",
        _here(parallel="{tensor: 1, pipeline: 1, sequence: 1, data: {zero: 3, shard: 2}}"),
    ),
    (
        "DeepSpeed #1403: an optimizer in host memory without ZeRO",
        spec(
            SOUND | {
                "model": "{layers: 2, hidden: 64, heads: 4, vocab: 256}",
                "hardware": "{accelerator: h100-sxm, per_node: 1}",
                "parallel": "{micro_batch: 1, data: {zero: 0}, offload: {optimizer: cpu}}",
                "training": "{sequence_length: 128, global_batch: 4}",
            }
        ),
    ),
    (
        "LLaMA-Factory #4014: 2e-5 is a number in YAML 1.2",
        _here(optimizer="{lr: 2e-5}", parallel="{tensor: 1, pipeline: 1}"),
    ),
    (
        "Megatron-LM #381: tied embeddings, and 7 layers on 2 stages as 3 and 4",
        _here(
            model=_MODEL.format(7, 4, 4, ", tied_embeddings: true"), hardware="{accelerator: cpu, per_node: 2}",
            parallel="{pipeline: {stages: 2, schedule: 1f1b, layers: [3, 4]}}",
        ),
    ),
    (
        "gpt-neox #1434: a head width of its own",
        _here(model=_MODEL.format(2, 3, 3, ", head_dim: 32"), parallel="{tensor: 1, pipeline: 1}"),
    ),
    (
        "frozen layers at the front of a pipeline",
        _here(
            model=_MODEL.format(4, 4, 4, ", frozen: ['embed.*', 'layers.0.*', 'layers.1.*']"),
            hardware="{accelerator: cpu, per_node: 2}", parallel="{pipeline: {stages: 2, schedule: 1f1b}}",
        ),
    ),
]  # fmt: skip
