"""What an import refuses: runs and systems that it has no price for, values that are none, files that never end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_engine_accelerate import ARGUMENTS, BELOW, trainer
from test_engine_commands import plan
from test_engine_torchtitan import IN, titan
from test_engines import CONFIG, SCRIPT, at, deepspeed, megatron, run

from partool.engines import Imported, Wanted, read, read_files
from partool.engines.budget import MAX_FILES
from partool.engines.imported import spec_text
from partool.engines.settings import whole_of
from partool.spec.loader import load_text


def errors(found: Imported) -> list[tuple[str, int]]:
    return [(each.code, each.span.line if each.span else 0) for each in found.findings if each.severity == "error"]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "change",
    [
        {"use_peft_lora": True}, {"lora_r": 8}, {"peft_config": {"peft_type": "LORA", "r": 8}}, {"use_qlora": "true"},
        {"lora_config": {"r": 16}}, {"load_in_4bit": True}, {"use_4bit_qunatization": True}, {"quantization_bit": 4},
        {"adapter_name_or_path": "out"}, {"use_dora": True}, {"prompt_tuning_init": "TEXT"}, {"train_type": "lora"},
        {"finetuning_type": "freeze"}, {"freeze_backbone": True}, {"tune_mm_mlp_adapter": True}, {"stage": "dpo"},
        {"stage": "rm"}, {"freeze_trainable_layers": 2}, {"cutoff_len": 512}, {"unfreeze_layers": "all"},
        {"freeze_layers": 16, "use_peft": False}, {"load_in_4bit": True, "use_peft": False},
        {"freeze_vision_tower": True, "finetuning_type": "full"},
    ],
    ids=str,
)  # fmt: skip
def test_runs_that_train_a_part_of_the_weights_are_errors(change: dict[str, Any]) -> None:
    found = [each for each in trainer(change).findings if each.severity == "error"]
    text = json.dumps(ARGUMENTS | change, indent=1).splitlines()
    assert {each.code for each in found} == {"PT823"}
    for each in found:
        assert each.help
        assert each.span is not None
        assert next(iter(change)).split(".")[0] in "".join(text[each.span.line - 3 : each.span.line])


@pytest.mark.parametrize(
    "change",
    [
        {"use_peft": False, "lora_r": 16, "lora_alpha": 32, "use_dora": True}, {"use_peft_lora": "False"},
        {"finetuning_type": "full", "lora_rank": 8, "cutoff_len": 512, "stage": "sft"}, {"load_in_8bit": False},
        {"quantization_bit": None, "bits": 16}, {"lora_r": 0}, {"freeze_vision_tower": False}, {"stage": "pt"},
    ],
    ids=str,
)  # fmt: skip
def test_adapters_that_are_off_are_no_errors(change: dict[str, Any]) -> None:
    found = trainer(change)
    assert (errors(found), found.understood) == ([], 1.0), found.findings


@pytest.mark.parametrize("program", ["scripts/run_dpo.py", "reward_modeling.py", "trl dpo", "grpo_trainer.py"])
def test_programs_of_other_tasks_are_errors(program: str) -> None:
    script = (
        f"accelerate launch --num_processes 8 {program} --model_name_or_path Qwen/Qwen3-8B --bf16 True "
        "--per_device_train_batch_size 1 --max_length 512\n"
    )
    found = read_files([(Path("run.sh"), script)], "accelerate", Wanted("h100-sxm"))
    assert ("PT823", 1) in errors(found)
    plain = script.replace(program, "scripts/run_sft.py")
    assert errors(read_files([(Path("run.sh"), plain)], "accelerate", Wanted("h100-sxm"))) == []


def test_adapters_of_the_other_systems_are_errors() -> None:
    for argument in ("--lora-rank 8", "--peft-type lora", "--freeze-layers 4", "--use-lora"):
        assert [code for code, _ in errors(megatron(argument))] == ["PT823"], argument
    assert errors(megatron("--multi-latent-attention --q-lora-rank 512 --kv-lora-rank 64")) == []
    assert "PT823" in [code for code, _ in errors(titan({"lora.rank": 8}))]


OTHERS = {
    "GPT-NeoX": ("neox.yml", '{"pipe-parallel-size": 1, "num-layers": 12, "train_micro_batch_size_per_gpu": 4}\n'),
    "GPT-NeoX, in JSON": ("n.json", '{"num_layers": 2, "hidden_size": 8, "train_micro_batch_size_per_gpu": 4}'),
    "ms-swift": ("sft.sh", "NPROC_PER_NODE=8 \\\nswift sft \\\n  --model Qwen/Qwen3-8B --bf16 true"),
    "ms-swift, with Megatron": ("m.sh", "megatron sft --load x --micro_batch_size 4 --tensor_model_parallel_size 2"),
    "LLaMA-Factory v1": ("v1.yaml", "model: Qwen/Qwen3-0.6B\noutput_dir: o\ndist_config: {name: fsdp2}\n"),
    "Axolotl": ("ax.yml", "base_model: a/b\nmicro_batch_size: 2\nsequence_len: 4096\noutput_dir: o\n"),
    "LLM Foundry": ("f.yaml", "max_seq_len: 8\ntrain_loader: {}\nfsdp_config: {sharding_strategy: FULL_SHARD}\n"),
    "describes a model": ("config.json", '{"architectures": ["A"], "model_type": "llama", "hidden_size": 8}'),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_systems_that_are_not_read_are_refused_by_name(name: str, tmp_path: Path) -> None:
    file, text = OTHERS[name]
    (tmp_path / file).write_text(text)
    path = str(tmp_path / file)
    for options in ([], ["--engine", "deepspeed"]):
        code, written, told = run(path, "--accelerator", "h100-sxm", *options)
        assert (code, written, "error[PT830]" in told) == (2, "", True), told
        assert name.partition(",")[0] in told
        assert "help: " in told
    if file != "config.json":
        code, written, told = plan(path)
        assert (code, written, "error[PT830]" in told) == (1, "", True), told


def test_json_of_no_system_is_not_taken_for_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"name": "x", "version": 1}')
    code, _, told = run(str(tmp_path / "a.json"), "--accelerator", "h100-sxm")
    assert (code, "is of no training system" in told) == (2, True)


@pytest.mark.parametrize("on", [True, 1, "true", "True", "yes", "1"])
def test_truth_in_deepspeed_is_written_in_several_ways(on: Any) -> None:
    found = deepspeed({"bf16": {"enabled": on}})
    assert (errors(found), at(found.spec, "training.precision")) == ([], "bf16")
    off = deepspeed({"bf16": {"enabled": 0}, "curriculum_learning": {"enabled": 0, "min_difficulty": 8}})
    assert (errors(off), at(off.spec, "training.precision")) == ([], "fp32")


DEEPSPEED: list[tuple[dict[str, Any], str]] = [
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
    ({"train_micro_batch_size_per_gpu": NAN}, "train_micro"),
    ({"train_batch_size": -1}, "train_batch_size"),
    ({"train_batch_size": True}, "train_batch_size"),
    ({"train_batch_size": 12345678901234567890123}, "train_batch_size"),
    ({"train_batch_size": [64]}, "train_batch_size"),
    ({"gradient_clipping": -1}, "gradient_clipping"),
    ({"gradient_clipping": INF}, "gradient_clipping"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": 2}}}, "device"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}}, "device"),
    ({"zero_optimization": {"stage": 7}}, "stage"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": 5}}}, "nvme_path"),
    ({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": -5}}, "threshold"),
    ({"zero_optimization": {"stage": 2, "cpu_offload": "maybe"}}, "cpu_offload"),
    ({"bf16": {"enabled": "perhaps"}}, "enabled"),
    ({"sequence_parallel_size": 0}, "sequence_parallel_size"),
    ({"tensor_parallel": {"autotp_size": -2}}, "autotp_size"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "lr"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}, "lr"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, NAN]}}}, "betas"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 7]}}}, "betas"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": INF}}}, "warmup_num_steps"),
]


@pytest.mark.parametrize(("change", "name"), DEEPSPEED, ids=[str(change) for change, _ in DEEPSPEED])
def test_values_that_are_none_are_errors_at_their_key(change: dict[str, Any], name: str) -> None:
    text = json.dumps(CONFIG | change, indent=2)
    for constant, yaml_form in (("NaN", ".nan"), ("-Infinity", "-.inf"), ("Infinity", ".inf")):
        text = text.replace(constant, yaml_form)
    wanted = Wanted("h100-sxm", 1, 8, "llama3-8b", {"training.sequence_length": 4096})
    found = [each for each in read(Path("ds.json"), text, "deepspeed", wanted).findings if each.severity == "error"]
    wrong = [each.span for each in found if each.code == "PT820"]
    assert wrong, found
    for span in wrong:
        assert span is not None
        assert name in "".join(text.splitlines()[span.line - 1 : span.line + 1])


@pytest.mark.parametrize(
    "argument",
    [
        "--num-layers .nan", "--num-layers nan", "--global-batch-size -1", "--micro-batch-size 0", "--hidden-size inf",
        "--global-batch-size 12345678901234567890123", f"--hidden-size {'9' * 6000}", "--tensor-model-parallel-size 0",
        "--num-query-groups 0", "--make-vocab-size-divisible-by 0", "--num-layers", "--bf16 false",
        "--num-experts 4 --moe-layer-freq 0",
        "--pipeline-model-parallel-size -2", "--zero-stage 9 --deepspeed", "--clip-grad -1", "--lr nan", "--lr quick",
        "--lr-warmup-iters inf", "--attention-dropout nan", "--context-parallel-size 0", "--train-iters 0",
        "--num-experts 8 --moe-router-topk 0", "--min-lr 1", "--optimizer-cpu-offload --optimizer-offload-fraction 3",
    ],
)  # fmt: skip
def test_arguments_of_megatron_that_are_no_numbers_are_errors_at_their_line(argument: str) -> None:
    found = megatron(argument)
    assert errors(found), found.findings
    line = next(n for n, each in enumerate(SCRIPT.splitlines(), 1) if "--data-path" in each)
    assert line in [each for _, each in errors(found)]


@pytest.mark.parametrize(
    ("change", "launch"),
    [
        ({"gradient_accumulation_steps": 0}, {}), ({"per_device_train_batch_size": -1}, {}), ({"max_steps": 1.5}, {}),
        ({"max_seq_length": NAN}, {}), ({"max_grad_norm": -1}, {}), ({"learning_rate": INF}, {}),
        ({"warmup_ratio": -0.1}, {}), ({"adam_beta1": 2}, {}), ({}, {"num_processes": 0}), ({}, {"num_machines": 0}),
        ({}, {"parallelism_config": {"parallelism_config_tp_size": 0}}),
        ({}, {**BELOW, "deepspeed_config": {"zero_stage": 9}}),
        ({}, {**BELOW, "deepspeed_config": {"zero_stage": 3, "offload_param_device": 2}}),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_trainer_that_are_no_numbers_are_errors(change: dict[str, Any], launch: dict[str, Any]) -> None:
    change = {
        name: str(value) if isinstance(value, float) and value != value else value for name, value in change.items()
    }
    assert "PT820" in [code for code, _ in errors(trainer(change, launch))]


@pytest.mark.parametrize(
    "change",
    [
        {"training.seq_len": -1}, {"training.steps": 10**23}, {IN + "pipeline_parallel_degree": 0},
        {"optimizer.lr": -1.0}, {IN + "data_parallel_shard_degree": 0}, {"training.local_batch_size": True},
        {"lr_scheduler.min_lr_factor": 7.0},
        {IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_split_points": ["layers." + "9" * 6000]},
    ],
    ids=lambda change: str(change)[:60],
)  # fmt: skip
def test_settings_of_torchtitan_that_are_no_numbers_are_errors(change: dict[str, Any]) -> None:
    found = titan(change)
    assert errors(found) or "split_points" in str(change)
    assert load_text(spec_text(found, Path("a"))).spec is not None or errors(found)


def test_numbers_are_carried_exactly() -> None:
    for number in (2**53 + 1, 12345678901234567890123):
        assert whole_of(number) == whole_of(str(number)) == number
    assert whole_of("5e8") == 500_000_000
    assert [whole_of(each) for each in (True, NAN, INF, "9" * 6000, "1.0", 1.5, "²", None, [1])] == [None] * 9


def test_what_the_spec_refuses_is_said_at_the_setting() -> None:
    """A rule about two fields is broken by two keys: the error is at the key, and not in a spec that nobody wrote."""
    found = deepspeed({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    (error,) = [each for each in found.findings if each.severity == "error"]
    assert error.code == "PT823"
    assert error.message.startswith("zero_optimization.offload_param.device: parameters cannot be in host memory")
    assert error.span is not None
    assert (error.span.file, error.span.line > 1) == ("ds.json", True)


def test_aliases_tags_and_keys_that_are_given_twice_are_refused() -> None:
    wanted = Wanted("h100-sxm", 1, 8, "llama3-8b", {"training.sequence_length": 4096})
    cases = {
        '{"train_batch_size": 64, "a": &a [1, 2], "b": *a}': "PT829",
        '{"train_batch_size": 64, "train_batch_size": 32}': "PT821",
        '{"train_batch_size": !!int "x"}': "PT829",
        '{"train_batch_size": 8, "x": ' + "[" * 40 + "]" * 40 + "}": "PT829",
        '{"train_batch_size": 8, ? [1] : 2}': "PT820",
    }
    for text, code in cases.items():
        assert code in [each.code for each in read(Path("ds.json"), text, "deepspeed", wanted).findings], text


def test_a_name_with_a_line_end_adds_no_line_to_the_spec() -> None:
    found = deepspeed({"a\nlaunch: {env: {X: y}}\n#": 1, "b\u2028name: evil": 2})
    text = spec_text(found, Path("ds\nname: x.json"))
    assert set(yaml.safe_load(text)) == set(found.spec)
    assert not load_text(text).has_errors


def test_files_outside_of_the_folder_are_sourced_only_where_they_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "inside" / "more").mkdir(parents=True)
    (tmp_path / "sizes.sh").write_text("LAYERS=12\n")
    (tmp_path / "inside" / "more" / "sizes.sh").write_text("LAYERS=24\n")
    (tmp_path / "inside" / "link.sh").symlink_to(tmp_path / "sizes.sh")
    script = tmp_path / "inside" / "train.sh"
    for name in ("../sizes.sh", "link.sh", str(tmp_path / "sizes.sh")):
        script.write_text(f"source {name}\n" + SCRIPT.replace("--num-layers 32", "--num-layers $LAYERS"))
        code, written, told = run(str(script), "--accelerator", "h100-sxm")
        assert (code, written) == (1, "")
        assert f"sources {name}, which lies outside" in " ".join(told.split())
        assert "--source-folder" in told
        code, written, told = run(str(script), "--accelerator", "h100-sxm", "--source-folder", str(tmp_path))
        assert (code, "layers: 12" in written) == (0, True), told
    script.write_text("source more/sizes.sh\n" + SCRIPT.replace("--num-layers 32", "--num-layers $LAYERS"))
    code, written, told = run(str(script), "--accelerator", "h100-sxm")
    assert (code, "layers: 24" in written) == (0, True), told


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    for path in (tmp_path / "pipe.sh", Path("/dev/zero"), tmp_path):
        code, written, told = run(str(path), "--accelerator", "h100-sxm")
        assert (code, written, "cannot be read" in told) == (2, "", True)
    (tmp_path / "train.sh").write_text("source pipe.sh\n" + SCRIPT)
    code, _, told = run(str(tmp_path / "train.sh"), "--accelerator", "h100-sxm")
    assert (code, "sources pipe.sh, which cannot be read" in told) == (0, True)


def test_an_error_names_the_limit(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    for text, says in (
        ("A=xxxxxxxxxx\n" + "A=$A$A\n" * 40, "4 MiB"),
        ("source train.sh\n" * 3, f"more than {MAX_FILES} others"),
        ("run " + "x " * 12_000 + "\n", "10,000 words"),
        ("#" * 600_000 + "\n", "512 KiB"),
    ):
        script.write_text(text + SCRIPT)
        code, written, told = run(str(script), "--accelerator", "h100-sxm")
        assert (code in (1, 2), written, "error[PT829]" in told, says in told) == (True, "", True, True), told
