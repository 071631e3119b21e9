"""One rank of ``data_parallel.py``: steps of one kind of loop, with the wall and CPU seconds at the end of each.

Started as ``_data_parallel_rank.py JOB OUT``. All kinds run the same decoder in fp32 with AdamW and clipping.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from partool.plan.types import Plan
from partool_runtime.model import Decoder

Mark = Callable[[], None]


def partool(plan: Path, folder: Path, mark: Mark) -> None:
    """Run the plan as a launched rank does; a step ends when its result is known."""
    from partool_runtime.jobs.train import stepping
    from partool_runtime.worker import main

    inner = stepping.Stepper.step

    def step(self: Any, *arguments: Any) -> Any:
        result = inner(self, *arguments)
        mark()
        return result

    stepping.Stepper.step = step  # type: ignore[method-assign]
    main([str(plan), "--run-dir", str(folder)])


def by_hand(kind: str, plan: Plan, mark: Mark) -> None:
    """Train on random tokens, with a typical hand-written DDP or FSDP2 loop."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Decoder(plan.model)
    if kind == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    betas = (plan.optimizer.betas[0], plan.optimizer.betas[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.optimizer.lr, betas=betas, fused=True)
    shape = (plan.training.global_batch // dist.get_world_size(), plan.training.sequence_length)
    for _ in range(plan.training.steps):
        tokens_BS = torch.randint(plan.model.vocab, shape)
        loss = wrapped(tokens_BS, tokens_BS) / tokens_BS.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        mark()
    dist.destroy_process_group()


def by_trainer(kind: str, plan: Plan, folder: Path, mark: Mark) -> None:
    """Train a Llama of the same sizes with transformers' Trainer, over DDP or FSDP2."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)
    shape, training = plan.model, plan.training
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn_hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=training.sequence_length,
    )  # fmt: skip

    class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return training.global_batch * training.steps

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens_S = torch.randint(
                shape.vocab, (training.sequence_length,), generator=torch.Generator().manual_seed(index)
            )
            return {"input_ids": tokens_S, "labels": tokens_S}

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            mark()

    sharded: dict[str, Any] = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=training.global_batch // int(os.environ["WORLD_SIZE"]),
        max_steps=training.steps, learning_rate=plan.optimizer.lr, max_grad_norm=plan.optimizer.clip,
        lr_scheduler_type="constant", optim="adamw_torch_fused", use_cpu=True, save_strategy="no", report_to=[],
        logging_strategy="no", disable_tqdm=True, ddp_backend="gloo", dataloader_num_workers=0,
        **(sharded if kind == "hf-fsdp2" else {}),
    )  # fmt: skip
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Tokens(), callbacks=[Marks()]).train()


def main() -> None:
    """Run one kind and write its time stamps."""
    job, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        marks.append((time.perf_counter(), time.process_time()))

    path = Path(job["plan"])
    plan = Plan.from_json(path.read_text(encoding="utf-8"))
    folder = out.parent / "run"
    if job["kind"].startswith("partool"):
        partool(path, folder, mark)
    elif job["kind"].startswith("hf"):
        by_trainer(job["kind"], plan, folder, mark)
    else:
        by_hand(job["kind"], plan, mark)
    out.write_text(json.dumps(marks), encoding="utf-8")


if __name__ == "__main__":
    main()
