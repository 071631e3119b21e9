"""Degrees, batches, pipelines, sequences, experts and memory that do not go together."""

from __future__ import annotations

from broken.case import Broken, broken

_GPT = "{layers: 8, hidden: 512, heads: 8, vocab: 50257, position: learned, max_position: 1024}"
_MIXTRAL = "mixtral-8x7b"
_DATA_PARALLEL = "tensor: 1, pipeline: 1, sequence: 1"
_STARCODER = (
    "{layers: 40, hidden: 6144, heads: 48, kv_heads: 1, ffn_hidden: 24576, activation: gelu, vocab: 49152, "
    "position: learned, max_position: 8192}"
)

CASES: list[Broken] = [
    # Degrees.
    broken(
        "torchtitan #27: dp(1) * sp(2) * pp(3) != WORLD_SIZE",
        "PT267", "parallel", "their product can be 1, 2, 4 or 8", parallel="{tensor: 2, pipeline: 3}",
    ),
    broken(
        "torchtitan #1184: eight shards and eight ranks per sequence on eight GPUs",
        "PT269", "parallel.data.shard", "1 data-parallel rank that sequence.degree: 8 leaves of 8 devices",
        parallel="{sequence: 8, data: {zero: 3, shard: 8}}",
    ),
    broken(
        "DeepSpeed #3634: 52 heads on 8 ranks ended with an assertion",
        "PT203", "parallel.tensor", "2 or 4 would be even", warns=True,
        model="{layers: 2, hidden: 6656, heads: 52, vocab: 32000}",
        parallel="{tensor: 8, pipeline: 1, micro_batch: 1}", training="{global_batch: 8}",
    ),
    broken(
        "accelerate #910: ZeRO with one data-parallel rank saves nothing",
        "PT268", "parallel.data.zero", "zero: 0", warns=True, hardware="{accelerator: h100-sxm, per_node: 2}",
        parallel="{tensor: 2, micro_batch: 1, data: {zero: 3}}", training="{global_batch: 8}",
    ),
    broken(
        "DeepSpeed #5066: an expert without tokens hangs ZeRO-3, and the leaf modules are misspelt",
        "PT461", "parallel.data.leaves", "layers.0.ffn", parallel="{data: {zero: 3, leaves: ['*.experst']}}",
    ),
    # Batches.
    broken(
        "DeepSpeed #6914: train_batch_size is not equal to micro_batch * acc * world_size",
        "PT259", "training.global_batch", "use 96 or 128",
        parallel=f"{{{_DATA_PARALLEL}, micro_batch: 4}}", training="{global_batch: 100}",
    ),
    broken(
        "OpenRLHF #346: 256 sequences on 7 GPUs",
        "PT259", "training.global_batch", "use 252 or 259",
        hardware="{accelerator: h100-sxm, per_node: 7}", parallel=f"{{{_DATA_PARALLEL}}}",
        training="{global_batch: 256}",
    ),
    # Pipelines.
    broken(
        "Megatron-LM #2718: 24 of 48 layers were left out without a word",
        "PT431", "parallel.pipeline.layers", "add 24",
        model="{layers: 48, hidden: 512, heads: 8, vocab: 32000}",
        parallel="{pipeline: {stages: 2, layers: [11, 13]}}",
    ),
    broken(
        "Megatron-LM #1778: one stage of one layer, of 20, was trained",
        "PT431", "parallel.pipeline.layers", "the model has 20",
        model="{layers: 20, hidden: 512, heads: 8, vocab: 32000}", parallel="{pipeline: {stages: 1, layers: [1]}}",
    ),
    broken(
        "Megatron-LM #1852: stages without layers hang",
        "PT264", "parallel.pipeline.stages", "use at most 4",
        model="{layers: 4, hidden: 512, heads: 8, vocab: 32000}", parallel="{pipeline: {stages: 8}}",
    ),
    broken(
        "Megatron-LM #468: layers and virtual stages that do not divide; here there are too many chunks",
        "PT264", "parallel.pipeline.chunks", "use at most 2",
        parallel="{pipeline: {stages: 4, schedule: interleaved, chunks: 4}}",
    ),
    broken(
        "Automodel #2575: 4 micro-batches for 8 interleaved stages",
        "PT430", "training.global_batch", "use global_batch: 8",
        model="{layers: 16, hidden: 512, heads: 8, vocab: 32000}", training="{global_batch: 4}",
        parallel="{tensor: 1, sequence: 1, micro_batch: 1, pipeline: {stages: 8, schedule: interleaved, chunks: 2}}",
    ),
    broken(
        "torchtitan #774: ZBV has two stages per rank, in a V",
        "PT223", "parallel.pipeline.chunks", "use chunks: 2",
        parallel="{pipeline: {stages: 2, schedule: zb-v, chunks: 4}}",
    ),
    broken(
        "pytorch #161904: zero-bubble schedules fail with compiled blocks",
        "PT434", "parallel.compile", "use compile: none or auto, or a schedule with whole backward passes",
        parallel="{compile: block, pipeline: {stages: 2, schedule: zb-v}}",
    ),
    # Sequences.
    broken(
        "verl #1226: Ulysses needs more heads; a ring or usp is the other way",
        "PT470", "parallel.sequence.degree", "method: ring or usp", warns=True,
        model="{layers: 2, hidden: 512, heads: 4, vocab: 32000}",
        parallel="{tensor: 1, pipeline: 1, micro_batch: 1, sequence: {method: ulysses, degree: 8}}",
        training="{global_batch: 8}",
    ),
    broken(
        "accelerate #4177: context parallelism replaced the sliding window by full attention",
        "PT468", "parallel.sequence.order", "contiguous or auto, or method: ulysses",
        model="{layers: 8, hidden: 512, heads: 8, vocab: 32000, attention: {window: 512}}",
        parallel="{sequence: {method: ring, degree: 4, order: zigzag}}",
    ),
    broken(
        "xDiT #471: a Ulysses degree that does not go with the rest of the layout",
        "PT467", "parallel.sequence.ulysses", "use 2 or 4",
        parallel="{sequence: {method: usp, degree: 8, ulysses: 3}}",
    ),
    broken(
        "transformers #14384: sequences longer than the positions end in a device-side assert",
        "PT257", "training.sequence_length", "use at most 1024", model=_GPT, training="{sequence_length: 2048}",
    ),
    # Experts.
    broken(
        "torchtitan #4258: an expert degree that does not divide the experts fails inside DeviceMesh",
        "PT266", "parallel.expert", "use 2 or 4", model=_MIXTRAL, parallel="{expert: 3}",
    ),
    broken(
        "DeepSpeed #1838: ep_size above world_size was cut without a word",
        "PT266", "parallel.expert", "use 2 or 4", model=_MIXTRAL, parallel="{expert: 8}",
        hardware="{accelerator: h100-sxm, per_node: 4}",
    ),
    broken(
        "Diffulex #37: top_k above num_experts fails in the router's kernel",
        "PT210", "model.moe.top_k", "use at most 4",
        model="{layers: 8, hidden: 512, heads: 8, vocab: 32000, moe: {experts: 4, top_k: 8, ffn_hidden: 128}}",
    ),
    # Memory, named while planning.
    broken(
        "LLaMA-Factory #3631: 8 B on 8 GPUs with 8192 tokens run out of memory after 40 minutes",
        "PT301", "hardware", "GiB: activations", model="llama3-8b",
        hardware="{accelerator: a100-80, per_node: 8}", training="{sequence_length: 8192, global_batch: 16}",
        parallel=f"{{{_DATA_PARALLEL}, micro_batch: 2, recompute: none, data: {{zero: 3}}, offload: none, "
        "tiles: {mlp: 0}}",
    ),
    broken(
        "pytorch rfcs #108: out of memory at step 40 of a rented GPU; will it fit?",
        "PT301", "hardware", "GiB: optimizer", model="llama3-8b",
        training="{sequence_length: 4096, global_batch: 8}",
        parallel=f"{{{_DATA_PARALLEL}, micro_batch: 1, recompute: full, data: {{zero: 0}}, offload: none}}",
    ),
    broken(
        "DeepSpeed #4867: a model of 15 B is offloaded to 256 GB of host memory, and the process is killed",
        "PT301", "hardware", "of host memory per node, 230 GiB may be used", model=_STARCODER,
        hardware="{accelerator: rtx-4090, per_node: 8, host_memory_gib: 256}",
        training="{sequence_length: 1024, global_batch: 8}",
        parallel=f"{{{_DATA_PARALLEL}, micro_batch: 1, recompute: full, data: {{zero: 3}}, "
        "offload: {optimizer: cpu, parameters: cpu, activations: none}}",
    ),
    # Offload.
    broken(
        "textgen #969: pinned memory fills the host",
        "PT473", "parallel.offload.pinned_gib", "activations: none", model="llama3-8b",
        hardware="{accelerator: h100-sxm, per_node: 1}", training="{sequence_length: 2048, global_batch: 8}",
        parallel="{micro_batch: 1, data: {zero: 0}, recompute: full, "
        "offload: {optimizer: cpu, gpu_fraction: 0, activations: cpu, pinned_gib: 0.01}}",
    ),
    broken(
        "DeepSpeed #2977: offload_param with stage 2, which has no shards of parameters",
        "PT224", "parallel.offload.parameters", "set data: {zero: 3}",
        parallel="{data: {zero: 2}, offload: {parameters: cpu}}",
    ),
    broken(
        "DeepSpeed #2624: nvme_path cannot be None if remote device is nvme",
        "PT230", "parallel.offload.optimizer", "add dir: /FOLDER", parallel="{offload: {optimizer: nvme}}",
    ),
    broken(
        "DeepSpeed #3062: not enough buffers for swapping",
        "PT105", "parallel.offload.buffers", "use 3 or more",
        parallel="{offload: {optimizer: nvme, dir: /nvme, buffers: 1}}",
    ),
]  # fmt: skip
