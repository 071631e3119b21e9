"""A Hugging Face model on two tensor ranks: the trainer's step against DeepSpeed's AutoTP."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import torch
from _tensor_job import Case, Job, make_plan, run, together
from _tensor_specs import FLOAT_TOLERANCE, SHAPES, SIZES, apart, spec
from transformers import LlamaConfig, LlamaForCausalLM

SIZE = "wide"


def save_llama(folder: str) -> None:
    """Write a Llama of random weights."""
    shape = SIZES[SIZE]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn_hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def job_of(folder: str, extra_path: str) -> Job:
    """Return a job of DeepSpeed's step and partool's, with transformers' modules and with partool's own decoder."""
    weights = {"weights": {"source": "hf", "path": folder}}
    theirs = make_plan(spec({"hf": folder} | weights, SHAPES[SIZE], "fp32", ranks=2))
    own = make_plan(spec({"config": folder} | weights, SHAPES[SIZE], "fp32", ranks=2))
    cases = (
        Case("AutoTP", "deepspeed"),
        Case("AutoTP, overlapped", "deepspeed", {"tensor_overlap": "backward"}),
        Case("partool, transformers' modules", plan=theirs),
        Case("partool, its own decoder", plan=own),
    )
    return Job(cases, own, hf=folder, extra_path=extra_path)


def against_deepspeed(extra_path: str, rounds: int) -> dict[str, Any]:
    """Compare losses, then times; ``extra_path`` has DeepSpeed's packages."""
    with tempfile.TemporaryDirectory() as folder:
        save_llama(folder)
        job = job_of(folder, extra_path)
        difference = apart(run(dataclasses.replace(job, losses=4)), FLOAT_TOLERANCE)
        found = run(dataclasses.replace(job, rounds=rounds, steps=2))
    return {
        "losses_apart_deepspeed": difference,
        "deepspeed": [{"size": SIZE} | row for row in together(found)],
    }
