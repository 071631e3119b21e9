"""Which code base a row is read as, and which facts a row changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partool.cost.training.predict import predict_time
from partool.replay.cases import case_of
from partool.replay.cells import Cells
from partool.work.stack import Stack
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


TENSOR = {"dp": "2", "tp": "4", "zero_or_fsdp": "FSDP2"}


@pytest.mark.parametrize("recompute", ["none", "full", "off"])
def test_a_cell_does_not_turn_off_what_another_cell_says(recompute: str) -> None:
    """FSDP2 beside recomputation "none" is no run without FSDP2, which would be one of Megatron with tensor ranks."""
    assert stack_of(**TENSOR, recompute=recompute, notes="TP 4").name == "fsdp2"
    assert stack_of(**TENSOR, recompute=recompute, notes="torch.compile").name == "fsdp2-compiled"


@pytest.mark.parametrize(
    ("source", "notes", "dtype", "name"),
    [
        ("torchtitan docs", "async TP", "bf16", "fsdp2-compiled"), ("torchtitan docs", "", "float8", "fsdp2-compiled"),
        ("torchtitan docs", "base differs from fp8", "bf16", "fsdp2"),
        ("torchao docs", "no compile", "float8", "fsdp2"),
    ],
)  # fmt: skip
def test_what_only_the_compiler_does_was_compiled(source: str, notes: str, dtype: str, name: str) -> None:
    assert stack_of(source=source, notes=notes, dtype=dtype, zero_or_fsdp="FSDP2").name == name


def test_recipes_of_eight_bit_training() -> None:
    """Scales per row take more casts and a slower product, and nothing is gathered in eight bits."""
    whole, rows, blocks = (
        stack_of(source="torchtitan docs", dtype=dtype, zero_or_fsdp="FSDP2", notes="torch.compile")
        for dtype in ("float8 tensorwise", "float8 rowwise", "MXFP8")
    )
    assert (whole.fp8_casts, whole.fp8_product, whole.fp8_tensor_gathers) == (3.75, 1.0, True)
    assert (rows.fp8_casts, rows.fp8_product, rows.fp8_tensor_gathers) == (7.5, 1.25, False)
    assert (blocks.fp8_casts, blocks.fp8_tensor_gathers) == (4.8, False)
    assert {one.fp8_kernel for one in (whole, rows, blocks)} == {"scaled_mm"}

    narrow = stack_of(source="torchtitan docs", dtype="float8", zero_or_fsdp="FSDP2", notes="float8 all-gather")
    assert (narrow.gather_bytes, whole.gather_bytes) == (1.0, 2.0)
    assert stack_of(source="Megatron recipes", dtype="fp8", notes="rowwise").fp8_product == 1.0


@pytest.mark.parametrize(
    ("source", "dtype", "notes", "kernel"),
    [
        ("Megatron-Bridge recipes", "FP8-SC", "", "block"), ("NeMo", "fp8", "blockwise FP8 recipe", "block"),
        ("torchtitan docs", "fp8 blockwise", "FSDP2", "block"), ("Megatron-LM", "fp8", "DeepGEMM", "block"),
        ("Megatron-Bridge recipes", "FP8-CS", "", "scaled_mm"), ("torchtitan docs", "MXFP8", "FSDP2", "scaled_mm"),
        ("Megatron-LM", "fp8", "blockwise ring attention", "scaled_mm"),
    ],
)  # fmt: skip
def test_scales_by_block_run_kernels_of_their_own(source: str, dtype: str, notes: str, kernel: str) -> None:
    """Their products and layers of experts have tables of their own; see the origins of prices."""
    stack = stack_of(source=source, dtype=dtype, notes=notes, year="2025")
    assert stack.fp8_kernel == kernel


def step_s(stack: Stack | None = None, **changes: str) -> float:
    job, layout = case_of(Cells({**BASE, **changes})).options[0]
    return predict_time(job if stack is None else replace(job, stack=stack), layout, 1).step_time_s


def test_collectives_of_projections_that_gather_alone_count_each() -> None:
    """Fourteen collectives instead of eight: the part of the time that collectives take grows by three quarters."""
    alone, together = (stack_of(**TENSOR, source=source) for source in ("KempnerForge", "torchtitan"))
    assert (alone.tensor_exchanges, alone.tensor_copies) == (1.75, 1.0)
    assert (together.tensor_exchanges, together.tensor_copies) == (1.0, 1.6)
    none, one, more = (
        step_s(replace(alone, tensor_exchanges=number), **TENSOR, source="KempnerForge") for number in (0.0, 1.0, 1.75)
    )
    assert more - one == pytest.approx(0.75 * (one - none), rel=0.02)


def test_gathers_in_eight_bits_are_shorter() -> None:
    row = {**TENSOR, "source": "torchtitan", "dtype": "float8", "notes": "torch.compile"}
    narrow = stack_of(**row)
    wide = replace(narrow, fp8_tensor_gathers=False)
    none = step_s(replace(narrow, tensor_exchanges=0.0), **row)
    # Sums of the head's float32 results stay wide.
    assert 0.74 < (step_s(narrow, **row) - none) / (step_s(wide, **row) - none) < 0.85
    bf16 = {**row, "dtype": "bf16"}
    assert step_s(narrow, **bf16) == step_s(wide, **bf16)


EXPERTS = {"model": "Qwen3-30B-A3B", "year": "2025", "n_gpus": "64", "dp": "64", "ep": "32", "global_batch": "64"}


@pytest.mark.parametrize(
    ("source", "year", "gpu", "notes", "once", "overlap"),
    [
        ("Megatron-Bridge performance summary", "2025", "H100", "", True, 0.6),
        ("Megatron-Bridge performance summary", "2025", "GB200", "", True, 0.0),
        ("Megatron-MoE-ModelZoo", "2025", "H100", "no a2a overlap", True, 0.0),
        ("Megatron-MoE-ModelZoo", "2025", "H100", "A2A dispatcher", False, 0.0),
        ("Megatron-MoE-ModelZoo", "2025", "GB200", "+1f1b overlap", True, 0.6),
        ("NVIDIA NeMo 24.x performance summary", "2024", "H100", "", False, 0.0),
        ("Megatron-LM README", "2025", "H100", "", False, 0.0),
        ("Megatron-LM README", "2025", "H100", "DeepEP; EP overlap", True, 0.6),
    ],
)
def test_exchanges_of_experts_by_recipe(
    source: str, year: str, gpu: str, notes: str, once: bool, overlap: float
) -> None:
    stack = stack_of(**EXPERTS | {"source": source, "year": year, "gpu": gpu, "notes": notes})
    assert (stack.sends_once, stack.overlap_expert) == (once, overlap)


def test_dense_rows_of_the_same_recipes_stay() -> None:
    stack = stack_of(source="Megatron-Bridge performance summary", year="2025")
    assert (stack.sends_once, stack.overlap_expert) == (False, 0.0)


def test_offload_without_a_stated_batch_may_accumulate() -> None:
    """Published figures are of tuned batches: one update in host memory for one small micro-batch is the slowest."""
    blank = {"zero_or_fsdp": "ZeRO-3 Offload", "global_batch": "", "year": "2021", "source": "DeepSpeed figure"}

    def steps(**changes: str) -> set[int]:
        return {layout.derived.accumulation for _, layout in case_of(Cells({**BASE, **blank, **changes})).options}

    assert steps(micro_batch="") == {1, 8}
    assert steps() == steps(micro_batch="", zero_or_fsdp="ZeRO-3") == {1}
    assert steps(micro_batch="", notes="grad accumulation: 4") == {4}


def test_zero_3_of_2021_hides_no_collectives() -> None:
    stack = stack_of(source="Megatron-LM SC21", year="2021", zero_or_fsdp="ZeRO-3", notes="deepspeed")
    assert (stack.name, stack.overlap_gathers, stack.overlap_gradients) == ("deepspeed-2021", 0.0, 0.0)
