"""Which code base a row is read as, and which facts a row changes."""

from __future__ import annotations

import pytest

from partool.replay.cases import case_of
from partool.replay.cells import Cells
from partool.work.stacks import Stack
from partool.work.training import TrainingWork

BASE = {
    "source": "test", "year": "2025", "model": "Llama-3-8B", "seq_len": "4096", "gpu": "H100-80GB", "n_gpus": "8",
    "gpus_per_node": "8", "dtype": "bf16", "dp": "8", "tp": "1", "pp": "1", "zero_or_fsdp": "", "recompute": "full",
    "micro_batch": "1", "global_batch": "32", "step_time_s": "3.0", "notes": "",
}  # fmt: skip
PIPED = {"dp": "1", "tp": "4", "pp": "2"}


def job_of(**changes: str) -> TrainingWork:
    return case_of(Cells({**BASE, **changes})).options[0][0]


def stack_of(**changes: str) -> Stack:
    return job_of(**changes).stack


@pytest.mark.parametrize(
    ("source", "notes", "zero", "year", "name"),
    [
        ("BigScience V100 GPT-2 experiments", "Megatron+DeepSpeed 3D", "", "2021", "deepspeed-pipeline+unfused"),
        ("BigScience V100 GPT-2 experiments", "Megatron only", "", "2021", "megatron-2021"),
        ("BLOOM paper", "", "ZeRO-1", "2022", "deepspeed-pipeline+unfused"),
        ("MT-NLG 530B (arXiv 2201.11990)", "", "", "2022", "deepspeed-pipeline+unfused"),
        ("Megatron-DeepSpeed runs", "", "ZeRO-1", "2024", "deepspeed-pipeline"),
        ("BigScience experiments", "DeepSpeed ZeRO", "ZeRO-3 (old branch)", "2021", "deepspeed-2021"),
        ("vTrain ground truth", "Megatron-DeepSpeed code base", "", "2024", "megatron-2021"),
        ("Megatron-LM SC21 Table 1", "", "", "2021", "megatron-2021"),
    ],
)
def test_megatrons_layers_under_deepspeed(source: str, notes: str, zero: str, year: str, name: str) -> None:
    """Before 2023 attention was unfused and norms were not shared among tensor ranks."""
    job = job_of(source=source, notes=notes, zero_or_fsdp=zero, year=year, dtype="fp16", **PIPED)
    assert job.stack.name == name
    if name.endswith("+unfused"):
        assert (job.stack.attention, job.stack.sequence_parallel) == ("unfused", False)
    if zero != "ZeRO-3 (old branch)":
        assert job.padded_vocab is not None


def test_runs_of_that_time_recompute_layers_unless_they_say_otherwise() -> None:
    case = case_of(Cells({**BASE, **PIPED, "source": "BLOOM paper", "year": "2022", "recompute": ""}))
    assert {layout.recompute for _, layout in case.options} == {("full",) * 32}
