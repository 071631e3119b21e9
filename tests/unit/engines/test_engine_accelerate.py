"""Runs of Hugging Face's Trainer under accelerate, FSDP and DeepSpeed become specs of exactly their layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_of
from test_engines import run

from partool.diagnostics.record import Diagnostic
from partool.engines import Imported, Wanted, engine_of, engine_of_all, kind_of, read_files
from partool.engines.accelerate_keys import NO_EFFECT

LAUNCH: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 2,
    "num_processes": 16, "machine_rank": 0,
    "fsdp_config": {
        "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct", "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4, "max_seq_length": 4096, "gradient_checkpointing": True, "learning_rate": 2e-5,
    "bf16": True, "output_dir": "out", "hub_token": "abcdef0123456789",
}  # fmt: skip
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}  # fmt: skip
H100 = Wanted("h100-sxm")
H100S = Wanted("h100-sxm", 2, 8)


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return the base with some values replaced, in inner sections too; None removes a key."""
    found = dict(base)
    for name, value in change.items():
        inner = found.get(name)
        found[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return {name: value for name, value in found.items() if value is not None}


def trainer(
    change: dict[str, Any] | None = None,
    launch: dict[str, Any] | None = None,
    deepspeed: dict[str, Any] | None = None,
    wanted: Wanted = H100,
) -> Imported:
    """Read the three files with some of their keys replaced; DeepSpeed's is there only if it is given."""
    files = [
        (Path("launch.yaml"), yaml.safe_dump(merged(LAUNCH, launch or {}), sort_keys=False)),
        (Path("args.json"), json.dumps(merged(ARGUMENTS, change or {}), indent=1)),
    ]
    if deepspeed is not None:
        files.append((Path("ds.json"), json.dumps(merged(DEEPSPEED, deepspeed), indent=1)))
    return read_files(files, "accelerate", wanted)


BELOW = {"distributed_type": "DEEPSPEED", "fsdp_config": None}


def at(spec: dict[str, Any], path: str) -> Any:
    found: Any = spec
    for name in path.split("."):
        found = found[name]
    return found


def errors(found: Imported) -> list[str]:
    return [each.code for each in found.findings if each.severity == "error"]


def test_files_are_read_whole() -> None:
    found = trainer()
    assert (found.findings, found.understood) == ([], 1.0)
    assert found.spec["engine"] == "accelerate"
    assert found.spec["model"] == {"preset": "llama3.1-8b"}
    assert found.spec["hardware"] == {"nodes": 2, "per_node": 8, "accelerator": "h100-sxm"}
    assert found.spec["training"] == {"sequence_length": 4096, "precision": "bf16", "global_batch": 128}
    assert at(found.spec, "parallel.data") == {"zero": 3, "shard": 16}
    assert (at(found.spec, "parallel.recompute"), at(found.spec, "parallel.micro_batch")) == ("full", 2)
    assert "abcdef0123456789" not in str(found.spec)


OF_ARGUMENTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"model_name_or_path": "Qwen/Qwen3-8B"}, "model.preset", "qwen3-8b"),
    ({"model_name_or_path": "/models/Meta-Llama-3-8B"}, "model.preset", "llama3-8b"),
    ({"per_device_train_batch_size": 1}, "parallel.micro_batch", 1),
    ({"per_device_train_batch_size": None}, "parallel.micro_batch", 8),
    ({"per_device_train_batch_size": None, "per_gpu_train_batch_size": 4}, "parallel.micro_batch", 4),
    ({"gradient_accumulation_steps": 8}, "training.global_batch", 256),
    ({"max_steps": 50}, "training.steps", 50),
    ({"bf16": False, "fp16": True}, "training.precision", "fp16"),
    ({"gradient_checkpointing": False}, "parallel.recompute", "none"),
    ({"torch_compile": True}, "parallel.compile", "block"),
    ({"torch_compile_backend": "inductor"}, "parallel.compile", "block"),
    ({"optim": "sgd"}, "optimizer.name", "sgd"),
    ({"optim": "lion_32bit"}, "optimizer.name", "lion"),
    ({"full_determinism": True}, "training.deterministic", True),
    ({"fsdp": "shard_grad_op auto_wrap"}, "parallel.data.zero", 2),
    ({"fsdp": "hybrid_shard auto_wrap"}, "parallel.data.shard", 8),
    ({"fsdp": ["full_shard", "offload"]}, "parallel.offload.optimizer", "cpu"),
    *(
        ({"max_seq_length": None, name: 1024}, "training.sequence_length", 1024)
        for name in ("max_length", "model_max_length", "block_size")
    ),
    ({"max_seq_length": None, "cutoff_len": 1024, "finetuning_type": "full"}, "training.sequence_length", 1024),
]  # fmt: skip
OF_LAUNCH: list[tuple[dict[str, Any], str, Any]] = [
    ({"num_processes": 8, "num_machines": 1}, "hardware.per_node", 8),
    ({"fsdp_config": {"fsdp_sharding_strategy": 2}}, "parallel.data.zero", 2),
    ({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, "parallel.data.zero", 0),
    ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}}, "parallel.data", {"zero": 2, "shard": 8}),
    (
        {"fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": None, "fsdp_reshard_after_forward": False}},
        "parallel.data.zero",
        2,
    ),
    ({"fsdp_config": {"fsdp_offload_params": True}}, "parallel.offload.parameters", "cpu"),
    ({"distributed_type": "MULTI_GPU", "fsdp_config": None}, "parallel.data", {"zero": 0}),
    ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "parallel.compile", "block"),
    (
        {"parallelism_config": {"parallelism_config_dp_shard_size": 8, "parallelism_config_dp_replicate_size": 2}},
        "parallel.data.shard",
        8,
    ),
    (
        {"parallelism_config": {"parallelism_config_dp_shard_size": 8, "parallelism_config_cp_size": 2}},
        "parallel.sequence.degree",
        2,
    ),
    (
        {"parallelism_config": {"parallelism_config_dp_shard_size": 8, "parallelism_config_tp_size": 2}},
        "parallel.tensor.degree",
        2,
    ),
    (
        {
            "distributed_type": "MEGATRON_LM", "fsdp_config": None,
            "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2},
        },
        "parallel.pipeline.stages",
        2,
    ),
    (
        {
            "distributed_type": "MEGATRON_LM", "fsdp_config": None,
            "megatron_lm_config": {"megatron_lm_use_distributed_optimizer": True},
        },
        "parallel.data.zero",
        1,
    ),
    (
        {
            "distributed_type": "MEGATRON_LM", "fsdp_config": None,
            "megatron_lm_config": {"megatron_lm_num_micro_batches": 3, "megatron_lm_recompute_activations": True},
        },
        "training.global_batch",
        96,
    ),
    ({**BELOW, "deepspeed_config": {"zero_stage": 1}}, "parallel.data.zero", 1),
    (
        {**BELOW, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu",
         "offload_optimizer_device": "cpu"}},
        "parallel.offload.parameters",
        "cpu",
    ),
    (
        {**BELOW, "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "nvme",
         "offload_optimizer_nvme_path": "/nvme"}},
        "parallel.offload.dir",
        "/nvme",
    ),
]  # fmt: skip
OF_DEEPSPEED: list[tuple[dict[str, Any], str, Any]] = [
    ({"zero_optimization": {"stage": 2}}, "parallel.data.zero", 2),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "parallel.offload.optimizer", "cpu"),
    ({"optimizer": {"type": "Lion"}}, "optimizer.name", "lion"),
    ({"sequence_parallel_size": 2}, "parallel.sequence.method", "ulysses"),
]


@pytest.mark.parametrize(("change", "path", "value"), OF_ARGUMENTS, ids=[str(change) for change, _, _ in OF_ARGUMENTS])
def test_arguments_are_carried(change: dict[str, Any], path: str, value: Any) -> None:
    found = trainer(change)
    assert (errors(found), found.understood) == ([], 1.0), found.findings
    assert at(found.spec, path) == value
    assert found.spec != trainer().spec


@pytest.mark.parametrize(("change", "path", "value"), OF_LAUNCH, ids=[str(change) for change, _, _ in OF_LAUNCH])
def test_settings_of_accelerate_are_carried(change: dict[str, Any], path: str, value: Any) -> None:
    found = trainer(launch=change)
    assert (errors(found), found.understood) == ([], 1.0), found.findings
    assert at(found.spec, path) == value
    assert found.spec != trainer().spec


@pytest.mark.parametrize(("change", "path", "value"), OF_DEEPSPEED, ids=[str(change) for change, _, _ in OF_DEEPSPEED])
def test_keys_of_deepspeed_are_carried(change: dict[str, Any], path: str, value: Any) -> None:
    found = trainer(launch=BELOW, deepspeed=change)
    assert (errors(found), found.understood) == ([], 1.0), found.findings
    assert at(found.spec, path) == value
    assert found.spec != trainer(launch=BELOW, deepspeed={}).spec


def told(found: Imported) -> list[Diagnostic]:
    """Return the findings but the note about DeepSpeed's buffers, which transformers sizes by the model."""
    return [each for each in found.findings if "size of a buffer" not in each.message]


def test_automatic_values_come_from_the_arguments() -> None:
    found = trainer(launch=BELOW, deepspeed={})
    assert (told(found), found.understood) == ([], 1.0)
    assert [each.severity for each in found.findings] == ["note"]
    assert (found.engine, found.spec["engine"]) == ("accelerate", "deepspeed")
    assert found.spec["training"] == {"sequence_length": 4096, "precision": "bf16", "global_batch": 128}
    assert at(found.spec, "parallel.micro_batch") == 2
    assert at(found.spec, "parallel.recompute") == "full"
    half = trainer({"bf16": False, "fp16": True}, BELOW | {"mixed_precision": "no"}, {})
    assert at(half.spec, "training.precision") == "fp16"


def test_llama_factory_recomputes_unless_it_is_told_not_to() -> None:
    factory = {"finetuning_type": "full", "gradient_checkpointing": None}
    assert at(trainer(factory).spec, "parallel.recompute") == "full"
    assert at(trainer(factory | {"disable_gradient_checkpointing": True}).spec, "parallel.recompute") == "none"
    assert at(trainer({"gradient_checkpointing": None}).spec, "parallel.recompute") == "none"


@pytest.mark.parametrize(
    ("change", "launch", "deepspeed", "code", "says"),
    [
        ({"fp16": True}, {}, None, "PT821", "both bf16 and fp16"),
        ({}, {"fsdp_config": {"fsdp_activation_checkpointing": True}}, None, "PT821", "activation_checkpointing"),
        ({"deepspeed": "ds.json"}, {}, {}, "PT821", "both asked for"),
        ({}, {"num_processes": 15}, None, "PT821", "15 processes"),
        (
            {}, {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}}, None, "PT821",
            "FSDP2",
        ),
        ({}, {"parallelism_config": {"parallelism_config_tp_size": 3}}, None, "PT821", "not 16 ranks"),
        ({}, BELOW, {"train_micro_batch_size_per_gpu": 3}, "PT821", "is 3"),
        ({"per_device_train_batch_size": None}, BELOW, {"train_micro_batch_size_per_gpu": 3}, "PT821", "by default"),
        ({}, {"fsdp_config": {"fsdp_sharding_strategy": "SOME_SHARD"}}, None, "PT823", "SOME_SHARD"),
        ({}, {"distributed_type": "TPU", "fsdp_config": None}, None, "PT823", "TPU"),
        ({}, {"mixed_precision": "int4"}, None, "PT824", "gives way"),
        ({"optim": "adamw_bnb_8bit"}, {}, None, "PT823", "adamw_bnb_8bit"),
        ({"use_peft": True}, {}, None, "PT823", "use_peft"),
        ({"finetuning_type": "lora"}, {}, None, "PT823", "lora"),
        ({"model_name_or_path": "acme/own-7b"}, {}, None, "PT822", "own-7b"),
        ({"gradient_accumulation_steps": "many"}, {}, None, "PT820", "many"),
        ({"deepspeed": "not_there.json"}, {"distributed_type": "MULTI_GPU"}, None, "PT825", "not_there.json"),
    ],
)  # fmt: skip
def test_contradictions_are_findings_with_their_line(
    change: dict[str, Any], launch: dict[str, Any], deepspeed: dict[str, Any] | None, code: str, says: str
) -> None:
    findings = trainer(change, launch, deepspeed).findings
    found = [each for each in findings if each.code == code and says in each.message]
    assert found, findings
    assert found[0].help
    assert found[0].span is not None
    texts = {
        "launch.yaml": yaml.safe_dump(merged(LAUNCH, launch), sort_keys=False),
        "args.json": json.dumps(merged(ARGUMENTS, change), indent=1),
        "ds.json": json.dumps(merged(DEEPSPEED, deepspeed or {}), indent=1),
    }
    line = texts[found[0].span.file].splitlines()[found[0].span.line - 1]
    inner = {name for part in (change, launch, deepspeed or {}) for name in part}
    inner |= {name for part in launch.values() if isinstance(part, dict) for name in part}
    assert any(name in line for name in inner) or "gradient_checkpointing" in line


SCRIPT = """\
export WANDB_API_KEY=0123456789abcdef
ACCELERATE_LOG_LEVEL=info accelerate launch --config_file configs/launch.yaml --num_processes 8 --num_machines 1 \\
    train.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --max_seq_length 2048 --bf16 True \\
    --gradient_accumulation_steps=2 --report_to wandb --hub_token secret0123456789
"""


def test_scripts_and_the_files_that_they_name_are_read(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "launch.yaml").write_text(yaml.safe_dump(LAUNCH))
    script = tmp_path / "scripts" / "run.sh"
    found = read_files([(script, SCRIPT)], "accelerate", H100)
    assert (found.findings, found.understood) == ([], 1.0)
    assert found.spec["hardware"] == {"nodes": 1, "per_node": 8, "accelerator": "h100-sxm"}
    assert found.spec["training"] == {"sequence_length": 2048, "precision": "bf16", "global_batch": 16}
    assert at(found.spec, "parallel.data") == {"zero": 3, "shard": 8}
    assert not any(each in str(found.spec) for each in ("0123456789abcdef", "secret0123456789"))
    missing = read_files([(Path("run.sh"), SCRIPT)], "accelerate", H100)
    assert "PT825" in errors(missing)


def test_other_launchers_are_read() -> None:
    for start in ("torchrun --nproc_per_node 8 --nnodes 2 --master_port 1", "deepspeed --num_gpus 8 --num_nodes 2"):
        script = (
            f"{start} train.py --deepspeed ds.json --model_name_or_path Qwen/Qwen3-8B --bf16 True "
            "--per_device_train_batch_size 1 --model_max_length 512 --output_dir out\n"
        )
        found = read_files([(Path("run.sh"), script), (Path("ds.json"), json.dumps(DEEPSPEED))], "accelerate", H100)
        assert (told(found), found.understood) == ([], 1.0)
        assert found.spec["hardware"] == {"nodes": 2, "per_node": 8, "accelerator": "h100-sxm"}
        assert found.spec["training"] == {"sequence_length": 512, "precision": "bf16", "global_batch": 16}


def test_what_the_files_do_not_say_is_asked_for() -> None:
    found = read_files([(Path("launch.yaml"), yaml.safe_dump(LAUNCH))], "accelerate", Wanted())
    asked = {".".join(map(str, each.path)) for each in found.findings if each.code == "PT822"}
    assert asked == {
        "training.sequence_length", "parallel.micro_batch", "training.global_batch", "hardware.accelerator",
        "model.preset",
    }  # fmt: skip


def test_arguments_without_a_launcher_are_priced_as_data_parallelism() -> None:
    found = read_files([(Path("args.json"), json.dumps(ARGUMENTS))], "accelerate", H100S)
    assert [each.code for each in found.findings] == ["PT824"]
    assert at(found.spec, "parallel.data") == {"zero": 0}


def test_what_nobody_knows_is_named_with_its_line() -> None:
    found = trainer({"new_kind_of_thing": 3}, {"fsdp_config": {"fsdp_new": 1}})
    unknown = {(fate.setting.name, fate.setting.file) for fate in found.fates if fate.kind == "not understood"}
    assert unknown == {("new_kind_of_thing", "args.json"), ("fsdp_config.fsdp_new", "launch.yaml")}


def test_no_setting_is_both_carried_and_without_effect() -> None:
    for found in (trainer(), trainer(launch=BELOW, deepspeed={})):
        carried = {
            fate.setting.name
            for fate in found.fates
            if fate.kind == "carried" and not fate.text.startswith("optimizer.")
        }
        assert carried
        assert not carried & NO_EFFECT.keys()
    names = {name for change, _, _ in OF_ARGUMENTS for name in change}
    assert not names & NO_EFFECT.keys()


def test_files_are_recognised_by_their_contents() -> None:
    texts = [yaml.safe_dump(LAUNCH), json.dumps(ARGUMENTS), json.dumps(DEEPSPEED), SCRIPT]
    assert [kind_of(text) for text in texts] == ["yaml", "json", "json", "script"]
    assert [engine_of(text) for text in texts] == ["accelerate", "accelerate", "deepspeed", "accelerate"]
    assert engine_of_all(texts) == "accelerate"
    assert engine_of_all([texts[0], "[training]\nsteps = 1\n"]) is None


def test_the_command_reads_several_files(tmp_path: Path) -> None:
    launch, arguments, out = (tmp_path / name for name in ("launch.yaml", "args.yaml", "spec.yaml"))
    launch.write_text(yaml.safe_dump(LAUNCH))
    arguments.write_text(yaml.safe_dump(ARGUMENTS | {"max_steps": 3, "odd_key": 1}))
    code, _, told = run(str(launch), str(arguments), "--accelerator", "h100-sxm", "-o", str(out))
    assert code == 0, told
    assert "odd_key is not understood" in told
    assert "odd_key (args.yaml, line " in out.read_text()
    plan = plan_of(out.read_text())
    assert (plan.engine, plan.layout.data.zero, plan.training.global_batch) == ("accelerate", 3, 128)


@given(
    st.dictionaries(
        st.sampled_from([*ARGUMENTS, *(name for change, _, _ in OF_ARGUMENTS for name in change)]),
        st.one_of(st.integers(-3, 10**10), st.floats(allow_nan=False), st.text(max_size=5), st.booleans(), st.none()),
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_values_are_read(change: dict[str, Any], below: bool) -> None:
    found = trainer(change, BELOW if below else None, {} if below else None)
    assert found.spec or errors(found)


def test_hostile_files_are_read() -> None:
    loop = "output_dir: a\ninner: &a\n  again: *a\nlist: &b [1, *b]\n"
    assert errors(read_files([(Path("args.yaml"), loop)], "accelerate", H100S)) == ["PT829"]
    odd = "output_dir: a\nday: 2024-99-99\nnumber: 0x_\n"
    assert read_files([(Path("args.yaml"), odd)], "accelerate", H100S).spec
    deep = "output_dir: a\nx: " + "[" * 700 + "]" * 700
    assert read_files([(Path("args.yaml"), deep)], "accelerate", H100S).findings


@pytest.mark.parametrize(
    ("change", "launch", "deepspeed", "says"),
    [
        ({"use_liger_kernel": True}, {}, None, "Liger"),
        ({"torch_dtype": "bfloat16"}, {"distributed_type": "MULTI_GPU", "fsdp_config": None}, None, "16 bits"),
        ({"torch_compile": True}, BELOW, {}, "not priced"),
        ({"auto_find_batch_size": True}, {}, None, "halved"),
    ],
)
def test_what_is_left_out_of_the_price_is_told(
    change: dict[str, Any], launch: dict[str, Any], deepspeed: dict[str, Any] | None, says: str
) -> None:
    found = trainer(change, launch, deepspeed)
    assert (errors(found), found.understood) == ([], 1.0)
    assert [says in each.message for each in told(found)] == [True]
    assert not told(trainer({}, launch, deepspeed))
