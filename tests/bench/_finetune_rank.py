"""One rank of ``finetune.py``: steps of one kind of trainer, with wall and CPU seconds and tokens at the end of each.

Started as ``_finetune_rank.py JOB OUT``. The result has ``marks``, a list of (wall seconds, CPU seconds, tokens that
are no padding), the bytes that were resident before the model was built, and the most bytes after that until the last
step's end, which leaves out partool's checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # both sides import it sooner or later, and it is no memory of a model

PADDING = 0
"""The token that both sides pad with; the tokenizer gives no text this token."""


class Meter:
    """Tokens, seconds and memory of this process."""

    def __init__(self) -> None:
        self.tokens = 0
        self.marks: list[tuple[float, float, int]] = []
        self.before_bytes = self.peak_bytes = 0

    def building(self) -> None:
        """Note the resident memory, and begin to watch its largest value."""
        self.before_bytes = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def count(self, tokens_BS: torch.Tensor) -> None:
        """Add the tokens of a micro-batch that are no padding."""
        self.tokens += int((tokens_BS != PADDING).sum())

    def mark(self) -> None:
        """Note the end of a step."""
        self.marks.append((time.perf_counter(), time.process_time(), self.tokens))
        self.peak_bytes = _status_bytes("VmHWM")

    def write(self, path: Path) -> None:
        """Write what was measured as JSON."""
        result = {"marks": self.marks, "before_bytes": self.before_bytes, "peak_bytes": self.peak_bytes}
        path.write_text(json.dumps(result), encoding="utf-8")


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def partool(plan: Path, folder: Path, meter: Meter) -> None:
    """Run the plan as a launched rank does; a step ends when its result is known."""
    from partool_runtime.jobs.train import stepping, trainer
    from partool_runtime.worker import main

    step_inner, prepare_inner = stepping.Stepper.step, trainer.prepare

    def step(self: Any, number: int, batch: Any, *arguments: Any) -> Any:
        result = step_inner(self, number, batch, *arguments)
        for micro in batch:
            meter.count(micro.tokens_BS)
        meter.mark()
        return result

    def prepare(*arguments: Any) -> Any:
        meter.building()
        return prepare_inner(*arguments)

    stepping.Stepper.step = step  # type: ignore[method-assign]
    trainer.prepare = prepare  # type: ignore[attr-defined]
    main([str(plan), "--run-dir", str(folder)])


def trl(job: dict[str, Any], folder: Path, meter: Meter) -> None:
    """Train with TRL's trainer under DistributedDataParallel, without recomputation."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    pairs = job["task"] == "dpo"

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.mark()

    base = DPOTrainer if pairs else SFTTrainer

    class Counted(base):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            meter.count(inputs["input_ids"])
            return super().training_step(model, inputs, *arguments, **named)

    common: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": job["steps"], "learning_rate": job["lr"], "max_length": job["length"],
        "lr_scheduler_type": "linear", "optim": "adamw_torch_fused", "use_cpu": True, "bf16": False,
        "save_strategy": "no", "report_to": [], "logging_steps": 1000, "disable_tqdm": True, "ddp_backend": "gloo",
        "gradient_checkpointing": False, "per_device_train_batch_size": job["per_device"], "weight_decay": 0.0,
        "max_grad_norm": 1.0, "ddp_find_unused_parameters": False,
    }  # fmt: skip
    if pairs:
        common |= {"beta": 0.1, "precompute_ref_log_probs": True, "padding_free": job["packing"]}
        arguments = DPOConfig(**common)
    else:
        arguments = SFTConfig(**common, packing=job["packing"], assistant_only_loss=True)
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    rows = load_dataset("json", data_files=job["records"], split="train", cache_dir=str(folder.parent / "cache"))
    peft_config = None
    if job["task"] == "lora":
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    meter.building()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    given = {"model": model, "args": arguments, "train_dataset": rows, "processing_class": tokenizer}
    Counted(**given, peft_config=peft_config, callbacks=[Marks()]).train()


def main() -> None:
    """Run one kind and write what it took."""
    job, out = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2])
    meter = Meter()
    if job["kind"].startswith("partool"):
        partool(Path(job["plan"]), out.parent / "run", meter)
    else:
        sys.path.insert(0, job["peers"])
        trl(job, out.parent / f"run-{os.environ['RANK']}", meter)
    meter.write(out)


if __name__ == "__main__":
    main()
