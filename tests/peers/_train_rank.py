"""One rank that trains by what partool writes for another system, or by partool itself: ``_train_rank.py JOB RESULT``.

All sides train one model of transformers, from the same weights and on the same tokens. Of DeepSpeed's configuration
one setting is added, torch's AdamW for DeepSpeed's own, which would be compiled first.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

BENCH = Path(__file__).parents[1] / "bench"


def rows(job: dict[str, Any], step: int, micro: int, rank: int) -> torch.Tensor:
    """Return the tokens of a micro-batch of a rank."""
    at = (step * job["accumulation"] + micro) * job["world"] + rank
    return torch.stack([sequence(job, at * job["micro"] + place) for place in range(job["micro"])])


def sequence(job: dict[str, Any], number: int) -> torch.Tensor:
    """Return the tokens of a sequence, with one more than is trained on; each step has the same, which are learnt."""
    drawn = torch.Generator().manual_seed(number % (job["accumulation"] * job["world"] * job["micro"]))
    return torch.randint(job["vocab"], (job["length"] + 1,), generator=drawn)


def mean(own: float) -> float:
    """Return the mean over ranks, which have equally many tokens."""
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def by_partool(job: dict[str, Any]) -> list[float]:
    """Make the trainer's own steps."""
    sys.path.append(str(BENCH))
    from _tensor_rank import partool_step

    from partool.plan.types import Plan
    from partool_runtime.data.batches import MicroBatch

    step = partool_step(Plan.from_json(job["plan"]))
    found = []
    for number in range(job["steps"]):
        batch = [rows(job, number, micro, dist.get_rank()) for micro in range(job["accumulation"])]
        found.append(step(number, [MicroBatch(each[:, :-1], each[:, 1:]) for each in batch]))
    return found


def prepared(job: dict[str, Any]) -> tuple[nn.Module, dict[str, Any], list[dict[str, Any]]]:
    """Return the model, ds_config.json with torch's AdamW, and groups that decay matrices only."""
    from transformers import AutoModelForCausalLM

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # it would be compiled
    config = json.loads(job["config"])
    config["optimizer"]["params"]["torch_adam"] = True
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    decay = config["optimizer"]["params"]["weight_decay"]
    return model, config, [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def trained(job: dict[str, Any], engine: Any, step: Callable[[torch.Tensor], None]) -> list[float]:
    """Train a DeepSpeed engine; ``step`` makes a micro-batch's backward pass, and the update behind the last one."""
    assert engine.zero_optimization_stage() == job["zero"]
    found = []
    for number in range(job["steps"]):
        losses = []
        for micro in range(job["accumulation"]):
            tokens = rows(job, number, micro, dist.get_rank())
            logits = engine(tokens[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            step(loss)
            losses.append(float(loss.detach()))
        found.append(mean(sum(losses) / len(losses)))
    return found


def by_deepspeed(job: dict[str, Any]) -> list[float]:
    """Train with ds_config.json through DeepSpeed's engine."""
    sys.path.append(os.environ["PARTOOL_PEERS"])
    import deepspeed

    model, config, groups = prepared(job)
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return trained(job, engine, step)


def by_plugin(job: dict[str, Any]) -> list[float]:
    """Train with ds_config.json through accelerate's plugin for DeepSpeed."""
    sys.path.append(os.environ["PARTOOL_PEERS"])
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    model, config, groups = prepared(job)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    assert PartialState().distributed_type.name == "DEEPSPEED"
    engine, _ = accelerator.prepare(model, DummyOptim(groups))

    def step(loss: torch.Tensor) -> None:
        with accelerator.accumulate(engine):  # says which backward pass ends a step
            accelerator.backward(loss)

    return trained(job, engine, step)


def by_trainer(job: dict[str, Any]) -> list[float]:
    """Train with accelerate.yaml and the written ``TrainingArguments``, as a script around ``Trainer`` does."""
    sys.path.append(os.environ["PARTOOL_PEERS"])
    from _judge_accelerate import launched
    from accelerate import DistributedType, PartialState
    from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

    _, environment = launched(job["options"])
    own = ("FSDP_", "PARALLELISM_", "ACCELERATE_")
    os.environ |= {name: value for name, value in environment.items() if name.startswith(own)}
    losses: list[float] = []

    class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return int(job["steps"] * job["accumulation"] * job["world"] * job["micro"])

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = sequence(job, index)
            return {"input_ids": tokens[:-1], "labels": tokens[:-1], "shift_labels": tokens[1:]}

    class Noting(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            logits, labels = outputs.logits.detach().flatten(0, 1), inputs["shift_labels"].flatten()
            losses.append(float(cross_entropy(logits, labels)))
            return (loss, outputs) if return_outputs else loss

    more = ["--output_dir", job["folder"], "--use_cpu", "true", "--ddp_backend", "gloo", "--save_strategy", "no",
            "--report_to", "none", "--disable_tqdm", "true", "--remove_unused_columns", "false"]  # fmt: skip
    arguments, _ = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(
        [*more, *job["arguments"]], return_remaining_strings=True
    )
    if job["zero"]:
        # accelerate shards for GPUs only; the state that TrainingArguments made says which devices there are.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    trainer = Noting(model=model, args=arguments, train_dataset=Tokens())
    assert trainer.is_fsdp_enabled == (job["zero"] > 0)
    trainer.train()
    size = job["accumulation"]
    assert len(losses) == job["steps"] * size
    return [mean(sum(losses[at : at + size]) / size) for at in range(0, len(losses), size)]


SIDES = {"partool": by_partool, "deepspeed": by_deepspeed, "plugin": by_plugin, "accelerate": by_trainer}


def main() -> None:
    """Train each of a job's cases, and write the loss of each step."""
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    found = [SIDES[job["side"]](job | case) for case in job["cases"]]
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
