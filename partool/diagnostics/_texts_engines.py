"""Rules about files of other training systems (PT820 to PT830)."""

from __future__ import annotations

from partool.diagnostics.record import BASE, Rule, command_rule

RULES: tuple[Rule, ...] = (
    command_rule(
        "PT820",
        "A setting of another system has no value that can be read",
        "The file is no JSON, or a number is expected where something else stands.",
        "--num-layers many",
        "--num-layers 32",
    ),
    command_rule(
        "PT821",
        "Settings of another system contradict each other",
        "The system itself would refuse these settings, or ignore one of them; or an option of the command says "
        "another number of machines than the files.",
        '{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8}   # on 8 ranks',
        '{"train_batch_size": 128, "train_micro_batch_size_per_gpu": 8}',
    ),
    command_rule(
        "PT822",
        "The files do not say something that a plan needs",
        "Files of other systems describe a part of a run: DeepSpeed's has no model, Megatron-LM's no kind of machine.",
        "partool import ds_config.json -o spec.yaml",
        "partool import ds_config.json --model llama3-8b --accelerator h100-sxm --nodes 1 --per-node 8 -o spec.yaml",
    ),
    command_rule(
        "PT823",
        "A setting of another system has no counterpart",
        "partool has no field for it, so that a price would be of another run.",
        "--cp-comm-type a2a+p2p",
        "--cp-comm-type a2a",
    ),
    command_rule(
        "PT824",
        "A setting of another system is left out of the price",
        "The price is that of the run without it; the finding says what the difference is.",
        "--hidden-dropout 0.1",
        "--hidden-dropout 0.0",
    ),
    command_rule(
        "PT825",
        "A script cannot be read to its end",
        "Scripts are read and never run: a value that depends on a command, a condition or an unset variable stays "
        "unknown, and so does a file that is not there, or that lies outside of the script's folder.",
        "--micro-batch-size $MBS   # and MBS is set nowhere",
        "partool import train.sh --define MBS=1 --accelerator h100-sxm -o spec.yaml",
    ),
    Rule(
        "PT826",
        "A plan is priced for another training system",
        "With `engine` the plan has the constants of that system. partool's runtime trains plans of its own only.",
        BASE.replace("cpu", "h100-sxm") + "engine: megatron\n",
        BASE.replace("cpu", "h100-sxm") + "engine: partool\n",
    ),
    Rule(
        "PT827",
        "Another training system's plan is for CPUs",
        "The constants of other systems come from runs on accelerators.",
        BASE + "engine: deepspeed\n",
        BASE.replace("cpu", "h100-sxm") + "engine: deepspeed\n",
    ),
    Rule(
        "PT828",
        "The training system cannot do what the spec asks for",
        "With `engine` a layout has only what that system has: a plan is for people who train with it.",
        BASE.replace("cpu", "h100-sxm") + "engine: megatron\nparallel:\n  recompute: selective\n",
        BASE.replace("cpu", "h100-sxm") + "engine: megatron\nparallel:\n  recompute: attention\n",
    ),
    command_rule(
        "PT829",
        "Files of another system are larger than an import reads",
        "Such files come from anywhere. An import reads a bounded number of files, bytes, words and values, and no "
        "file that repeats its values by aliases, so that none can fill the memory or keep the command busy.",
        "A=$A$A; A=$A$A; A=$A$A   # 40 times",
        "A=8",
    ),
    command_rule(
        "PT830",
        "The file is of a system that is not imported",
        "Its names resemble those of a system that is, but they mean other things: a price would be of another run.",
        "swift sft --model Qwen/Qwen3-8B --train_type lora",
        "accelerate launch train.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1",
    ),
)
