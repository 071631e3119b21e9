"""Sequence method compiled against partool's hand-written Ulysses, step by step in the same two processes.

``python tests/bench/graph_sequence.py`` takes three minutes on an otherwise idle machine. A small Llama is trained in
float32 on two CPU ranks that share its sequences, in three ways that take turns: built by transformers and rewritten as
a graph, built by transformers with its attention replaced, and as partool's own decoder. Tensors that are saved for the
backward pass are counted once by their storage. Where ``deepspeed`` can be imported (0.19 or newer), its AutoSP pass
takes turns as well, with torch's functions as its backend and a sum of gradients after each step. It does not rewrite
the Llama of transformers 5 (the mask keeps the size of the whole sequence), so it trains a plain module, as does
partool.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import _graph_net
import torch
import torch.distributed as dist
from _record import write
from _start import start_ranks

BIN = Path(sys.executable).parent
RANKS, LENGTH, ROUNDS, WARMUP = 2, 1024, 25, 4
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1376,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
WAYS = {
    "compiled": ("hf", "compiled"),
    "ulysses in transformers": ("hf", "ulysses"),
    "ulysses in partool's decoder": ("config", "ulysses"),
    "compiled, plain module": ("module", "compiled"),
}
PEER = "DeepSpeed's AutoSP, plain module"


def spec(folder: Path, source: str, method: str) -> str:
    """Return the spec of one way."""
    model = f'"{_graph_net.__name__}:Net"' if source == "module" else folder / "model"
    return f"""
model: {{{source}: {model}}}
hardware: {{accelerator: cpu, per_node: {RANKS}}}
training: {{sequence_length: {LENGTH}, steps: 4, global_batch: 1, precision: fp32}}
data: {{source: python-stdlib}}
kernels: {{mode: torch}}
parallel:
  micro_batch: 1
  sequence: {{method: {method}, degree: {RANKS}}}
  data: {{zero: 0}}
  recompute: none
  compile: none
"""


def own_path() -> list[str]:
    """Return the folders of this process's PYTHONPATH."""
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def main() -> None:
    """Plan the three ways, run them in turns, and write ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        plans = {}
        for number, (way, (source, method)) in enumerate(WAYS.items()):
            file, out = folder / f"{number}.yaml", folder / f"{number}-plan.json"
            file.write_text(spec(folder, source, method), encoding="utf-8")
            command = [BIN / "partool", "plan", file, "--out", out, "--trust-remote-code"]
            paths = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *own_path()])}
            subprocess.run(command, check=True, capture_output=True, env=paths)
            plans[way] = str(out)
        (folder / "job.json").write_text(json.dumps(plans), encoding="utf-8")
        start_ranks(Path(__file__), folder, RANKS, 900)
        found: dict[str, dict[str, Any]] = json.loads((folder / "0.json").read_text(encoding="utf-8"))
    ratios = {}
    for way, other in found.items():
        own = "compiled, plain module" if "plain module" in way else "compiled"
        if way != own:
            first = found[own]
            ratios[way] = {
                "speed": statistics.median(b / a for a, b in zip(first["step_s"], other["step_s"], strict=True)),
                "cpu_s": statistics.median(a / b for a, b in zip(first["cpu_s"], other["cpu_s"], strict=True)),
                "saved_bytes": first["saved_bytes"] / other["saved_bytes"],
                "sent_bytes": first["sent_bytes"] / other["sent_bytes"] if other["sent_bytes"] else None,
            }
    medians = {
        way: {
            "step_s": statistics.median(each["step_s"]),
            "cpu_s": statistics.median(each["cpu_s"]),
            "saved_bytes": each["saved_bytes"],
            "sent_bytes": each["sent_bytes"],
            "loss": each["loss"],
        }
        for way, each in found.items()
    }
    result = {"rounds": ROUNDS, "tokens": LENGTH, "ranks": RANKS, "medians": medians, "compiled_against": ratios}
    write("graph_sequence", result, "torch", "transformers")


class DeepSpeedPass:
    """Steps of the plain module through DeepSpeed's AutoSP pass."""

    def __init__(self) -> None:
        import deepspeed
        from deepspeed.compile.passes.sp_compile import apply_autosp, prepare_autosp_inputs

        deepspeed.init_distributed(dist_backend="gloo")
        self.model = _graph_net.Net()
        self.prepare = prepare_autosp_inputs

        def backend(graph: Any, inputs: Any) -> Any:
            apply_autosp(graph, inputs, sp_size=RANKS, dp_size=1)
            return graph.forward

        def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.model(tokens)
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

        self.loss = torch.compile(loss, backend=backend, fullgraph=True)

    def step(self, batch: Any, weight: torch.Tensor, timer: Any) -> torch.Tensor:
        """Run one step like ``Passes.step``."""
        tokens, labels = batch[0].tokens_BS, batch[0].labels_BS
        tokens, labels, _, _ = self.prepare(tokens.clone(), labels.clone())
        self.model.zero_grad()
        total: torch.Tensor = self.loss(tokens, labels)
        (total * weight).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        return total.detach()


def rank(job: Path, out: Path) -> None:
    """Run all ways in turn, as one rank."""
    from partool.plan.types import Plan
    from partool_runtime.data.batches import MicroBatch
    from partool_runtime.mesh import build_ranks
    from partool_runtime.parallel.comm import SEQUENCE, CommCounter
    from partool_runtime.preparation import prepare
    from partool_runtime.weights import fill, post_load

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    prepared, found = {}, {}
    tokens = torch.randint(CONFIG["vocab_size"], (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))  # type: ignore[call-overload]
    batch = [MicroBatch(tokens[:, :-1], tokens[:, 1:], None)]
    weight = torch.tensor(1.0 / LENGTH)
    for way, file in json.loads(job.read_text(encoding="utf-8")).items():
        plan = Plan.from_json(Path(file).read_text(encoding="utf-8"))
        one = prepare(plan, build_ranks(plan, torch.device("cpu")), lambda done, sent: None)
        fill(one.model, plan.weights, seed=0)
        post_load(one.model)
        prepared[way] = one
        found[way] = {"step_s": [], "cpu_s": []}
    passes: dict[str, Any] = {way: one.passes for way, one in prepared.items()}
    if importlib.util.find_spec("deepspeed") is not None:
        passes[PEER] = DeepSpeedPass()
        found[PEER] = {"step_s": [], "cpu_s": []}
    for way, one in passes.items():
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if not isinstance(tensor, torch.nn.Parameter):
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        one.step(batch, weight, lambda term: nullcontext())
        # A compiled function does not run under a counter.
        counting = CommCounter() if way in prepared else nullcontext(None)
        with counting as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = one.step(batch, weight, lambda term: nullcontext())
        sent = sum(each.sent_bytes for each in counter.snapshot(described=SEQUENCE).values()) if counter else 0
        dist.all_reduce(loss)
        found[way] |= {"saved_bytes": sum(saved.values()), "sent_bytes": sent, "loss": float(loss) / LENGTH}
    for number in range(ROUNDS + WARMUP):
        for way, one in passes.items():
            dist.barrier()
            start_s, cpu_s = time.perf_counter(), time.process_time()
            one.step(batch, weight, lambda term: nullcontext())
            both = torch.tensor([time.perf_counter() - start_s, time.process_time() - cpu_s], dtype=torch.float64)
            dist.all_reduce(both)
            if number >= WARMUP:
                found[way]["step_s"].append(float(both[0]) / RANKS)
                found[way]["cpu_s"].append(float(both[1]))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
