"""Precisions, optimizers, keys, types and units that are not what they seem."""

from __future__ import annotations

from broken.case import Broken, broken

CASES: list[Broken] = [
    # Precision.
    broken(
        "TransformerEngine #1159: fp8 on a card without fp8",
        "PT263", "training.precision", "write precision: bf16",
        hardware="{accelerator: a100-80, per_node: 8}", training="{precision: fp8}",
    ),
    broken(
        "stanford_alpaca #133: bf16 on V100",
        "PT263", "training.precision", "write precision: fp16",
        hardware="{accelerator: v100-32, per_node: 8}", training="{precision: bf16}",
    ),
    broken(
        "TransformerEngine #1422: fp8 and a width that is no multiple of 16",
        "PT490", "training.precision", "multiples of 16", warns=True,
        model="{layers: 2, hidden: 896, heads: 8, ffn_hidden: 712, vocab: 32000}",
        training="{precision: fp8, global_batch: 8}",
        parallel="{tensor: 1, pipeline: 1, sequence: 1, micro_batch: 1, data: {zero: 1}}",
    ),
    broken(
        "dolly #11: the precision is set in two places; here it is one field with other words",
        "PT105", "training.precision", "did you mean `fp16`?", training="{precision: float16}",
    ),
    broken(
        "LMFlow #88: --bf16, a switch of other tools",
        "PT101", "bf16", "`training.precision`", bf16="true",
    ),
    # Optimizers and schedules.
    broken(
        "Megatron-LM #2164: an optimizer that does not go with the distributed optimizer",
        "PT105", "optimizer.name", "adamw, lion, adagrad, sgd, muon, zero_one_adam, zero_one_lamb or lamb",
        optimizer="{name: dist_muon}",
    ),
    broken(
        "torchtitan #1495: warm-up of 200 in 20 steps was shortened in a warning",
        "PT213", "optimizer.schedule.warmup_steps", "use at most",
        training="{steps: 20}", optimizer="{schedule: {warmup_steps: 200}}",
    ),
    broken(
        "torchtitan #1495: and the decay became 0 steps",
        "PT215", "optimizer.schedule.decay_steps", "can be at most 10",
        training="{steps: 20}", optimizer="{schedule: {kind: wsd, warmup_steps: 10, decay_steps: 16}}",
    ),
    broken(
        "LLaMA-Factory #4149: a learning rate read as text",
        "PT102", "optimizer.lr", "write 2e-5 without quotes", optimizer="{lr: '2e-5'}",
    ),
    # Keys.
    broken(
        "aorta #247: paralellism: ddp had no effect",
        "PT101", "paralellism", "did you mean `parallel`?", paralellism="{tensor: 2}",
    ),
    broken(
        "starcoder #41: gradient_accumulation_steps beside a batch that contradicts it",
        "PT101", "training.gradient_accumulation_steps", "follows from `training.global_batch`",
        training="{gradient_accumulation_steps: 8}",
    ),
    broken(
        "ms-swift #5737: Megatron's names of degrees",
        "PT101", "parallel.tensor_model_parallel_size", "`parallel.tensor`",
        parallel="{tensor_model_parallel_size: 8}",
    ),
    broken(
        "ArcticTraining #85: a key given twice, of which the last one wins",
        "PT008", "training", "keep one of the two", training="{sequence_length: 1024, sequence_length: 262144}",
    ),
    # Types and units.
    broken(
        "LLaMA-Factory #6568: a share of held-out data, here as a percentage",
        "PT102", "data.validation", "write 0.1", data="{source: python-stdlib, validation: 10%}",
    ),
    broken(
        "LLaMA-Factory #744: validation without held-out data ends the run after thousands of steps",
        "PT218", "training.validation", "set data.validation", training="{validation: {every: 2000}}",
    ),
]  # fmt: skip

ALMOST: list[tuple[str, str, str]] = [
    ("training: {sequence_length: 8k}", "PT102", "write all digits, such as 8192"),
    ("training: {sequence_length: 2048.0}", "PT102", "write 2048"),
    ("training: {global_batch: 64 sequences}", "PT102", "write 64"),
    ("training: {steps: '1,000'}", "PT102", "write 1000 without quotes"),
    ("training: {deterministic: yes}", "PT102", "did you mean `true`?"),
    ("training: {precision: float32}", "PT105", "did you mean `fp32`?"),
    ("training: {gradient_checkpointing: true}", "PT101", "`parallel.recompute`"),
    ("optimizer: {lr: .nan}", "PT104", "use a finite number"),
    ("optimizer: {clip: null}", "PT102", "leave the key out for its default"),
    ("optimizer: {name: adamw_torch_fused}", "PT105", "did you mean `adamw`?"),
    ("optimizer: {max_grad_norm: 1.0}", "PT101", "`optimizer.clip`"),
    ("parallel: {recompute: true}", "PT105", "did you mean `full`?"),
    ("parallel: {offload: {gpu_fraction: 50}}", "PT105", "it is a fraction of 1"),
    ("checkpoint: {save_steps: 500}", "PT101", "`checkpoint.every`"),
    ("checkpoint: {resume_from_checkpoint: true}", "PT101", "--resume RUN"),
    ("lora: {r: 8}", "PT101", "adapter: {rank"),
    ("optimizer: {momentum: 90%}", "PT102", "write 0.9"),
]
"""Lines that are almost right: the line, the code, and the help."""
