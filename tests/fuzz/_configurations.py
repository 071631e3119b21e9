"""Files of other training systems for attacks: the published ones of ``tests/data/corpus``, mutated, and bombs."""

from __future__ import annotations

import copy
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CORPUS = Path(__file__).parents[1] / "data" / "corpus"
MACHINES = ["--accelerator", "h100-sxm"]
EIGHT = [*MACHINES, "--nodes", "1", "--per-node", "8"]
LENGTH = ["--model", "llama3-8b", "--set", "training.sequence_length=2048"]
RUN = (
    "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 8 --micro-batch-size 1 --vocab-size 100 "
)
LAUNCH: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 2,
    "num_processes": 16, "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"},
    "parallelism_config": {"parallelism_config_dp_shard_size": 16},
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-8B", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "max_seq_length": 4096, "gradient_checkpointing": True, "learning_rate": 2e-5, "bf16": True, "max_steps": 100,
    "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "adam_beta1": 0.9, "weight_decay": 0.1, "max_grad_norm": 1.0,
}  # fmt: skip
TITAN: dict[str, dict[str, Any]] = {
    "model": {"name": "llama3", "flavor": "8B"}, "optimizer": {"name": "AdamW", "lr": 3e-4, "beta1": 0.9, "eps": 1e-8},
    "training": {"local_batch_size": 2, "global_batch_size": 64, "seq_len": 8192, "steps": 1000, "max_norm": 1.0},
    "parallelism": {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2, "context_parallel_degree": 1, "pipeline_parallel_layers_per_stage": 8,
        "pipeline_parallel_schedule": "Interleaved1F1B", "pipeline_parallel_microbatch_size": 1,
    },
    "lr_scheduler": {"warmup_steps": 10, "decay_ratio": 0.2, "decay_type": "linear", "min_lr_factor": 0.1},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "validation": {"enable": True, "freq": 50, "steps": 2, "local_batch_size": 4},
}  # fmt: skip
VALUES: list[Any] = [
    0, 1, -1, 2, 3, 7, 10**6, 10**9, 10**18, 10**23, 2**63, -(10**30), 0.0, 0.5, -0.5, 1e-9, 1e300, 1.5, float("nan"),
    float("inf"), float("-inf"), "", " ", "auto", "none", "true", "False", "1", "0", "-1", "1e9", "1e400", "nan", "inf",
    "9" * 6000, "cpu", "nvme", "lora", "full", "x", "x" * 5000, "a\nb", "\x1b[31m", "é", "²", "$(id)", "$X", "--",
    "[1,", None, True, False, [], {}, [1, 2], [[]], {"a": {}}, {"enabled": 1}, [None] * 50,
]  # fmt: skip
"""Values of the wrong type, sign or size."""


@cache
def _seeds() -> list[tuple[str, str, list[str]]]:
    """Return name, text and options of each file of the corpus, and of one run of each of the other two systems."""
    rows = json.loads((CORPUS / "index.json").read_text(encoding="utf-8"))
    found = []
    for row in rows:
        told = row["told"]
        options = ["--accelerator", told["accelerator"]]
        for name in ("nodes", "per_node", "model"):
            options += [f"--{name.replace('_', '-')}", str(told[name])] if name in told else []
        options += [part for key, value in told.get("set", {}).items() for part in ("--set", f"{key}={value}")]
        options += [part for key, value in told.get("define", {}).items() for part in ("--define", f"{key}={value}")]
        found.append((row["file"], (CORPUS / row["file"]).read_text(encoding="utf-8"), options))
    found += [
        ("launch.yaml", yaml.safe_dump(LAUNCH | ARGUMENTS), MACHINES),
        ("args.json", json.dumps(ARGUMENTS), EIGHT),
    ]
    return [*found, ("job.toml", _toml(TITAN), ["--accelerator", "h100-sxm", "--nodes", "2", "--per-node", "8"])]


def mutated(rng: random.Random) -> tuple[str, str, list[str]]:
    """Return name, text and the command's options of a file after one to three mutations."""
    # The corpus has 70 files, and the other systems three.
    seeds = _seeds()
    name, text, options = rng.choice(seeds[-3:] if rng.random() < 0.3 else seeds)
    suffix = Path(name).suffix
    for _ in range(rng.choice([1, 1, 2, 3])):
        if suffix == ".sh":
            text = _script(rng, text)
        elif suffix == ".toml":
            document = copy.deepcopy(TITAN)
            _structure(rng, document)
            text = _toml(document)
        else:
            text = _document(rng, text, suffix)
    if rng.random() < 0.1:
        text = text[: rng.randrange(len(text) + 1)]
    return f"case{suffix}", text, options


def _document(rng: random.Random, text: str, suffix: str) -> str:
    try:
        document = yaml.safe_load(text.replace("\t", " "))
    except (yaml.YAMLError, ValueError):
        return text
    if not isinstance(document, dict) or not document:
        return text
    _structure(rng, document)
    return json.dumps(document, indent=1) if suffix == ".json" else yaml.safe_dump(document, sort_keys=False)


def _structure(rng: random.Random, document: dict[str, Any]) -> None:
    """Change one value, or move, remove, repeat or nest one."""
    places = [(document, key) for key in document]
    places += [(inner, key) for inner in document.values() if isinstance(inner, dict) for key in inner]
    at, key = rng.choice(places)
    other, name = rng.choice(places)
    kind = rng.randrange(6)
    if kind <= 2:
        at[key] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 3:
        at[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(at[key])
    elif kind == 4:
        del at[key]
    else:
        value: Any = at[key]
        for _ in range(rng.choice([1, 8, 40, 100])):
            value = {key: value} if rng.random() < 0.5 else [value]
        at[key] = value


def _toml(document: dict[str, Any]) -> str:
    lines = list[str]()
    for section, keys in document.items():
        if isinstance(keys, dict):
            lines += [f"[{section}]", *(f"{key} = {_of_toml(value)}" for key, value in keys.items())]
        else:
            lines.insert(0, f"{section} = {_of_toml(keys)}")
    return "\n".join(lines) + "\n"


def _of_toml(value: Any) -> str:
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, float) and abs(value) == float("inf"):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_of_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_of_toml, value)) + "]"
    return '"none"' if value is None else json.dumps(value)


def _script(rng: random.Random, text: str) -> str:
    """Change a number or a word of a script, or move, remove or repeat a line."""
    kind, lines = rng.randrange(7), text.split("\n")
    if kind <= 3:
        numbers = list(re.finditer(r"(?<=[ =])\d+(?=\s|$)" if kind < 3 else r"\S+", text))
        if not numbers:
            return text
        word, value = rng.choice(numbers), rng.choice(VALUES)
        shown = str(value) if not isinstance(value, str) or rng.random() < 0.5 else f"'{value}'"
        return text[: word.start()] + shown + text[word.end() :]
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    if kind == 4:
        lines[one], lines[two] = lines[two], lines[one]
    elif kind == 5:
        lines[one:one] = [lines[two]] * rng.choice([1, 2, 300])
    else:
        lines[one] = rng.choice(["fi", "then", "A=(", 'B="', "$((", "source case.sh", "case x in", "#SBATCH --nodes=3"])
    return "\n".join(lines)


def bombs() -> dict[str, tuple[str, str]]:
    """Return files that are small and stand for much: the name of each bomb → the file's name and text."""
    deep = "[" * 50_000 + "]" * 50_000
    aliases = "".join(f"k{n + 1}: &k{n + 1} [{', '.join([f'*k{n}'] * 9)}]\n" for n in range(9))
    functions = "".join(f"def f{n}():\n" + f"    c = f{n + 1}()\n" * 40 + "    return c\n" for n in range(8))
    return {
        "variable": ("a.sh", "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + RUN + "--x $A\n"),
        "array": ("a.sh", "A=(x y)\n" + "A=(${A[@]} ${A[@]})\n" * 40 + RUN + "${A[@]}\n"),
        "quoted array": ("a.sh", "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + RUN + "${A[@]}\n"),
        "growing array": ("a.sh", "A=(x y)\n" + "A+=(${A[@]})\n" * 40 + RUN + "${A[@]}\n"),
        "default": ("a.sh", f"B={'x' * 100_000}\nC=${{A:-{'$B' * 50_000}}}\n{RUN}"),
        "one word": ("a.sh", f"B={'x' * 100_000}\nC={'$B' * 50_000}\n{RUN}"),
        "sums": ("a.sh", "A=9\n" + "A=$((A*A))\n" * 60 + RUN),
        "sources itself": ("a.sh", "source a.sh\n" * 20 + RUN),
        "device": ("a.sh", "source /dev/zero\n" + RUN),
        "link": ("a.sh", "source link.sh\n" + RUN),
        "pipe": ("a.sh", "source pipe.sh\n" + RUN),
        "named pipe": ("a.sh", "accelerate launch --config_file pipe.yaml t.py --per_device_train_batch_size 1 --a"),
        "digits": ("a.sh", f"A={'9' * 6000}\nif [ $A -gt 5 ]; then B=1; fi\n{RUN}--hidden-size {'9' * 6000}\n"),
        "digits of JSON": ("a.json", f'{{"train_batch_size": {"9" * 6000}}}'),
        "digits of TOML": ("a.toml", f"[training]\nseq_len = {'9' * 6000}\n"),
        "then": ("a.sh", "then " * 5000 + RUN),
        "signs": ("a.sh", "if " + "! " * 5000 + "[ 1 = 1 ]; then A=1; fi\n" + RUN),
        "arguments": ("a.sh", RUN + " ".join(f"--a{n} 1" for n in range(50_000))),
        "fewer arguments": ("a.sh", RUN + " ".join(f"--a{n}" for n in range(9_000))),
        "repeated arguments": ("a.sh", RUN + " ".join(f"--a{n} $B" for n in range(4_500))),
        "unknown variables": ("a.sh", f'A="{" ".join(f"$X{n} --y" for n in range(15_000))}"\n{RUN}$A'),
        "dashes": ("a.sh", f"{RUN}--{'a-' * 100_000}"),
        "open substitutions": ("a.sh", RUN + "$((" * 100_000),
        "open sums": ("a.sh", RUN + "$(" * 100_000),
        "operators": ("a.sh", RUN + "\n" + ";" * 400_000),
        "programs": ("a.sh", "deepspeed " + "a.py " * 60_000),
        "launchers": ("a.sh", "deepspeed " * 40_000),
        "aliases": ("a.yaml", f"distributed_type: FSDP\nk0: &k0 [x, x, x]\n{aliases}"),
        "an alias in JSON": ("a.json", '{"train_batch_size": 64, "zero_optimization": &a {"stage": 1, "more": *a}}'),
        "nested JSON": ("a.json", f'{{"train_batch_size": 8, "a": {deep}}}'),
        "nested TOML": ("a.toml", f"[training]\nx = {deep}\n"),
        "dotted TOML": ("a.toml", f"[training]\n{'.'.join('a' * 20_000)} = 1\n"),
        "nested Python": ("a.py", f"import torchtitan\ndef f():\n    return Trainer.Config(x={'-' * 50_000}1)\n"),
        "functions": ("a.py", f"import torchtitan\n{functions}def f8():\n    return Trainer.Config(x=1)\n"),
        "many keys": ("a.json", '{"train_batch_size": 8, ' + ", ".join(f'"k{n}": 1' for n in range(2_400)) + "}"),
        "large": ("a.sh", "#" * 3_000_000 + "\n" + RUN),
        "no text": ("a.sh", RUN + "\udcff"),
        "empty": ("a.sh", ""),
    }  # fmt: skip
