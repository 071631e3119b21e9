"""Fine-tuning on two CPU ranks against TRL's trainers: tokens that are no padding per second, and memory.

``python tests/bench/finetune.py PEERS [--tasks sft,lora,dpo] [--rounds 5] [--steps 30]``: PEERS is a folder with
``trl``, ``peft`` and ``datasets`` (``make peers``, build/peers). Runs alternate.

A Llama of 56 million parameters, drawn at random, in fp32, one thread a rank, gloo, AdamW, no recomputation. The data
are those of specs/finetune/make_data.py. TRL runs with padding and with packing (DPO: padding-free), with the
reference of DPO computed before the first step, which is not timed on either side. partool runs with ZeRO 0 and with
the planner's own layout. Memory is the most that the larger rank held, above what it held before the model was built.
CPU seconds are those of both ranks together, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from _record import write
from _start import start_ranks
from overhead import BIN, ROOT

RANKS, WARMUP_STEPS = 2, 4
DATA = ROOT / "specs/finetune/data"
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 640,
    "intermediate_size": 1728, "num_hidden_layers": 11, "num_attention_heads": 10, "num_key_value_heads": 5,
    "max_position_embeddings": 640, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "sft": {"length": 256, "batch": 4, "padded": 3, "lr": 1e-4, "records": "chats.jsonl"},
    "lora": {"length": 256, "batch": 4, "padded": 6, "lr": 4e-3, "records": "chats.jsonl"},
    "dpo": {"length": 640, "batch": 2, "padded": 2, "lr": 1e-5, "records": "preferences.jsonl", "most": 120},
}
"""``batch``: sequences of partool and of TRL with packing, over all ranks. ``padded``: conversations, or pairs, that a
rank of TRL takes without packing; about as many as its packed sequences hold. ``most``: how many records both sides
get, as both compute the reference of all of them before the first step."""
KINDS = ("trl padded", "trl packed", "partool zero-0", "partool")


def make_inputs(folder: Path) -> None:
    """Write the model, and the data if they are missing."""
    if not (DATA / "preferences.jsonl").exists():
        subprocess.run([sys.executable, ROOT / "specs/finetune/make_data.py"], check=True, capture_output=True)
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    model.save_pretrained(folder / "model")


def records_of(task: str, folder: Path) -> Path:
    """Return the file with the records that a task trains on."""
    settings = TASKS[task]
    file = DATA / str(settings["records"])
    if "most" not in settings:
        return file
    shorter = folder / file.name
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    shorter.write_text("".join(lines[: settings["most"]]), encoding="utf-8")
    return shorter


def make_plan(task: str, kind: str, steps: int, folder: Path, inputs: Path) -> Path:
    """Write the plan of one kind, from data that are prepared."""
    settings = TASKS[task]
    spec: dict[str, Any] = {
        "spec": 1, "name": f"finetune-{task}",
        "model": {"config": f"{inputs}/model/config.json", "weights": {"source": "hf", "path": f"{inputs}/model"}},
        "hardware": {"accelerator": "cpu", "per_node": RANKS},
        "training": {
            "sequence_length": settings["length"], "global_batch": settings["batch"], "steps": steps,
            "precision": "fp32", "log_every": 1000,
        },
        "optimizer": {"lr": settings["lr"], "weight_decay": 0, "schedule": {"kind": "linear", "min_ratio": 0}},
        "data": {"source": str(records_of(task, inputs)), "tokenizer": str(DATA / "tokenizer")},
    }  # fmt: skip
    if task == "dpo":
        spec["training"]["objective"] = {"kind": "dpo", "beta": 0.1}
        spec["data"]["truncate"] = "drop"
    if task == "lora":
        spec["adapter"] = {"kind": "lora", "rank": 16, "alpha": 32}
    if kind == "partool zero-0":
        zero = {"zero": 0}
        spec["parallel"] = {
            "data": zero,
            "tensor": 1,
            "recompute": "none",
            "compile": "none",
            "micro_batch": settings["batch"] // RANKS,
        }
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    for command in (["data", "prepare"], ["plan", "--out", folder / "plan.json"]):
        subprocess.run([BIN / "partool", *command, folder / "spec.yaml"], cwd=folder, check=True, capture_output=True)
    return folder / "plan.json"


def measure(job: dict[str, Any], folder: Path) -> dict[str, float]:
    """Run one kind once; return its tokens per second and per CPU second, and its memory in MiB."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    start_ranks(ROOT / "tests/bench/_finetune_rank.py", folder, RANKS, 1800.0)
    ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    first, last = ([rank["marks"][at] for rank in ranks] for at in (WARMUP_STEPS - 1, -1))
    tokens = sum(after[2] - before[2] for before, after in zip(first, last, strict=True))
    wall_s = max(after[0] - before[0] for before, after in zip(first, last, strict=True))
    cpu_s = sum(after[1] - before[1] for before, after in zip(first, last, strict=True))
    memory = max(rank["peak_bytes"] - rank["before_bytes"] for rank in ranks) / 2**20
    return {"tokens_per_s": tokens / wall_s, "tokens_per_cpu_s": tokens / cpu_s, "memory_mib": memory, "tokens": tokens}


def compare(task: str, peers: str, steps: int, rounds: int, folder: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Measure all kinds in alternation; return each kind's medians and partool's ratios to the faster side of TRL."""
    settings = TASKS[task]
    shared = {"task": task, "steps": steps, "peers": peers, "model": str(folder / "model"), "lr": settings["lr"]}
    shared |= {"tokenizer": str(DATA / "tokenizer"), "records": str(records_of(task, folder))}
    jobs: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        jobs[kind] = shared | {"kind": kind, "length": settings["length"]}
        if kind.startswith("partool"):
            jobs[kind]["plan"] = str(make_plan(task, kind, steps, folder / task / f"plan {kind}", folder))
        else:
            packing = kind == "trl packed"
            per_device = settings["batch"] // RANKS if packing and task != "dpo" else settings["padded"]
            jobs[kind] |= {"packing": packing, "per_device": per_device}
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind, job in jobs.items():
            runs[kind].append(measure(job, folder / task / f"{kind} {number}"))
            print(task, number, kind, {key: round(value, 1) for key, value in runs[kind][-1].items()}, file=sys.stderr)
    return {"runs": runs, "ratios": {kind: ratios(runs, kind) for kind in kinds if kind.startswith("partool")}}


def ratios(runs: dict[str, list[dict[str, float]]], kind: str) -> dict[str, float]:
    """Return medians over the rounds of a kind's figures divided by those of TRL's faster side, by wall time."""
    peers = [name for name in runs if name.startswith("trl")]
    if not peers:
        return {}
    faster = max(peers, key=lambda name: statistics.median(run["tokens_per_s"] for run in runs[name]))
    keys = ("tokens_per_s", "tokens_per_cpu_s", "memory_mib")
    pairs = list(zip(runs[kind], runs[faster], strict=True))
    return {key: statistics.median(ours[key] / theirs[key] for ours, theirs in pairs) for key in keys}


def main() -> None:
    """Measure the tasks and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", help="folder with trl, peft and datasets")
    parser.add_argument("--tasks", default="sft,lora,dpo")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--name", default="finetune", help="name of the result")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        kinds = tuple(given.kinds.split(","))
        measured = {
            task: compare(task, given.peers, given.steps, given.rounds, folder, kinds)
            for task in given.tasks.split(",")
        }
    write(given.name, {"rounds": given.rounds, "steps": given.steps, "tasks": measured}, "torch", "transformers")


if __name__ == "__main__":
    main()
