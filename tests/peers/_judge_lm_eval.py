"""lm-evaluation-harness with its own model class over a folder of transformers: FOLDER LENGTH OUT TASK...

transformers computes norms and rotations of a Llama in float32, whatever the type of its weights; here they stay in
float64, so that the model is one to which sixteen digits can be compared.
"""

from __future__ import annotations

import json
import sys

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from partool_runtime.hf.numerics import stay_wide


def keep_wide(model: torch.nn.Module) -> None:
    """Make a Llama compute in float64 throughout."""
    rotary, config = model.model.rotary_emb, model.config
    places = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    rotary.inv_freq = 1.0 / config.rope_parameters["rope_theta"] ** places
    stay_wide(model)


def judge(folder: str, length: int, tasks: list[str]) -> dict[str, object]:
    model = HFLM(pretrained=folder, dtype="float64", device="cpu", batch_size=4, max_length=length)
    keep_wide(model.model)
    manager = TaskManager(include_defaults=False)
    results = simple_evaluate(model=model, tasks=tasks, task_manager=manager, log_samples=True)
    requests = [
        {"task": task, "document": sample["doc_id"], "request": index, "response": responses[0]}
        for task, samples in results["samples"].items()
        for sample in samples
        for index, responses in enumerate(sample["resps"])
    ]
    return {"results": results["results"], "requests": requests}


if __name__ == "__main__":
    folder, length, out, *tasks = sys.argv[1:]
    with open(out, "w", encoding="utf-8") as file:
        json.dump(judge(folder, int(length), tasks), file, default=str)
