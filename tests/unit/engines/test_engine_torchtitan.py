"""Job configurations of torchtitan, and scripts with options over them, become specs of exactly their layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_of

from partool.catalog.lookup import table
from partool.engines import Engine, Imported, Wanted, engine_of, kind_of, read, read_files
from partool.engines.torchtitan_keys import NO_EFFECT
from partool.engines.torchtitan_layout import spread
from partool.engines.torchtitan_models import FLAVOURS
from partool.strategies.engines import ENGINES

BASE: dict[str, Any] = {
    "job.dump_folder": "./outputs", "model.name": "llama3", "model.flavor": "8B", "model.hf_assets_path": "./hf",
    "optimizer.name": "AdamW", "optimizer.lr": 3e-4, "training.local_batch_size": 2, "training.seq_len": 8192,
    "training.steps": 1000, "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1, "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op", "compile.enable": False,
}  # fmt: skip
SIXTEEN = Wanted("h100-sxm", 2, 8)


def toml(change: dict[str, Any]) -> str:
    """Return the base configuration with some of its keys replaced; None removes a key."""
    lines, sections = list[str](), dict[str, list[str]]()
    for name, value in (BASE | change).items():
        section, _, key = name.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}  # {name}")
    for section, keys in sections.items():
        lines += [f"[{section}]", *keys, ""]
    return "\n".join(lines)


def titan(change: dict[str, Any], wanted: Wanted = SIXTEEN) -> Imported:
    return read(Path("job.toml"), toml(change), "torchtitan", wanted)


def at(spec: dict[str, Any], path: str) -> Any:
    found: Any = spec
    for name in path.split("."):
        found = found[name]
    return found


def errors(found: Imported) -> list[str]:
    return [each.code for each in found.findings if each.severity == "error"]


def test_a_configuration_is_read_whole() -> None:
    found = titan({})
    assert (found.findings, found.understood) == ([], 1.0)
    assert found.spec["model"] == {"preset": "llama3.1-8b"}
    assert found.spec["training"] == {
        "sequence_length": 8192, "steps": 1000, "precision": "bf16", "global_batch": 32,
    }  # fmt: skip
    assert at(found.spec, "parallel.data") == {"zero": 3, "shard": 16}
    assert (at(found.spec, "parallel.recompute"), at(found.spec, "parallel.micro_batch")) == ("selective", 2)


IN = "parallelism."
CARRIED: list[tuple[dict[str, Any], str, Any]] = [
    ({"model.flavor": "70B"}, "model.preset", "llama3.1-70b"),
    ({"model.name": "qwen3", "model.flavor": "0.6B"}, "model.preset", "qwen3-0.6b"),
    ({"model.name": "deepseek_v3", "model.flavor": "16B"}, "model.preset", "deepseek-v2-lite"),
    ({"model.flavor": "debugmodel"}, "model.vocab", 2048),
    ({"optimizer.name": "SGD"}, "optimizer.name", "sgd"),
    ({"training.local_batch_size": 4}, "parallel.micro_batch", 4),
    ({"training.global_batch_size": 64}, "training.global_batch", 64),
    ({"training.seq_len": 4096}, "training.sequence_length", 4096),
    ({"training.steps": 10}, "training.steps", 10),
    ({"training.mixed_precision_param": "float32"}, "training.precision", "fp32"),
    ({"training.enable_cpu_offload": True}, "parallel.offload.parameters", "cpu"),
    ({"debug.deterministic": True}, "training.deterministic", True),
    ({"model.converters": ["float8"]}, "training.precision", "fp8"),
    ({"model.converters": ["quantize.linear.float8"]}, "training.precision", "fp8"),
    ({"float8.enable_float8_linear": True}, "training.precision", "fp8"),
    ({"compile.enable": True}, "parallel.compile", "block"),
    ({"training.compile": True, "compile.enable": None}, "parallel.compile", "block"),
    ({IN + "data_parallel_shard_degree": 8, IN + "data_parallel_replicate_degree": 2}, "parallel.data.shard", 8),
    ({IN + "data_parallel_replicate_degree": 4}, "parallel.data.shard", 4),
    ({IN + "data_parallel_shard_degree": 1, IN + "data_parallel_replicate_degree": 16}, "parallel.data.zero", 0),
    ({IN + "fsdp_reshard_after_forward": "never"}, "parallel.data.zero", 2),
    ({IN + "tensor_parallel_degree": 4}, "parallel.tensor.degree", 4),
    (
        {IN + "tensor_parallel_degree": 4, IN + "enable_sequence_parallel": False},
        "parallel.tensor.sequence_norms",
        False,
    ),
    (
        {IN + "tensor_parallel_degree": 4, IN + "enable_async_tensor_parallel": True, "compile.enable": True},
        "parallel.tensor.overlap",
        "symmetric",
    ),
    ({IN + "pipeline_parallel_degree": 4}, "parallel.pipeline.layers", [8, 9, 8, 7]),
    (
        {IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_schedule": "GPipe"},
        "parallel.pipeline.schedule",
        "gpipe",
    ),
    (
        {IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_schedule": "Interleaved1F1B"},
        "parallel.pipeline.chunks",
        2,
    ),
    (
        {IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_schedule": "ZBVZeroBubble"},
        "parallel.pipeline.schedule",
        "zb-v",
    ),
    (
        {IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_split_points": ["layers.20"]},
        "parallel.pipeline.layers",
        [20, 12],
    ),
    (
        {
            IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_schedule": "Interleaved1F1B",
            IN + "pipeline_parallel_layers_per_stage": 5, IN + "pipeline_parallel_first_stage_less_layers": 0,
        },
        "parallel.pipeline.chunks",
        3,
    ),
    (
        {
            IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_first_stage_less_layers": 4,
        },
        "parallel.pipeline.layers",
        [15, 17],
    ),
    (
        {
            IN + "pipeline_parallel_degree": 2, IN + "module_fqns_per_model_part": [
                ["tok_embeddings", *(f"layers.{place}" for place in range(15))],
                [*(f"layers.{place}" for place in range(15, 32)), "norm", "output"],
            ],
        },
        "parallel.pipeline.layers",
        [15, 17],
    ),
    ({IN + "pipeline_parallel_degree": 2}, "parallel.micro_batch", 1),
    (
        {IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_microbatch_size": 2},
        "parallel.micro_batch",
        2,
    ),
    ({IN + "context_parallel_degree": 2}, "parallel.sequence.method", "all_gather"),
    (
        {IN + "context_parallel_degree": 2, IN + "context_parallel_rotate_method": "alltoall"},
        "parallel.sequence.method",
        "ring",
    ),
    (
        {IN + "context_parallel_degree": 2, IN + "context_parallel_load_balancer": "none"},
        "parallel.sequence.order",
        "contiguous",
    ),
    ({"model.name": "llama4", "model.flavor": "17bx16e", IN + "expert_parallel_degree": 8}, "parallel.expert", 8),
    (
        {
            "model.name": "llama4", "model.flavor": "17bx16e", IN + "expert_parallel_degree": 8,
            IN + "tensor_parallel_degree": 2, IN + "expert_tensor_parallel_degree": 2,
        },
        "parallel.expert_tensor",
        2,
    ),
    ({"activation_checkpoint.mode": "full"}, "parallel.recompute", "full"),
    ({"activation_checkpoint.mode": "none"}, "parallel.recompute", "none"),
    ({"activation_checkpoint.selective_ac_option": "2"}, "parallel.recompute", ["none", "full"] * 16),
    ({"activation_checkpoint.selective_ac_option": "1"}, "parallel.recompute", "full"),
    ({"activation_checkpoint.selective_ac_option": None}, "parallel.recompute", ["none", "full"] * 16),
    (
        {"validation.enable": True, "validation.freq": 50, "validation.steps": 2, "validation.local_batch_size": 4},
        "training.validation",
        {"every": 50, "samples": 128},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "path", "value"), CARRIED, ids=[str(change) for change, _, _ in CARRIED])
def test_keys_are_carried(change: dict[str, Any], path: str, value: Any) -> None:
    found = titan(change)
    assert (errors(found), found.understood) == ([], 1.0), found.findings
    assert at(found.spec, path) == value
    assert found.spec != titan({}).spec


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({IN + "data_parallel_shard_degree": 3}, "PT821", "there are 16"),
        ({IN + "tensor_parallel_degree": 3}, "PT821", "there are 16"),
        ({"training.global_batch_size": 33}, "PT821", "no multiple"),
        ({IN + "tensor_parallel_degree": 2, IN + "enable_async_tensor_parallel": True}, "PT821", "compiled"),
        ({IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_microbatch_size": 3}, "PT821", "micro-batches"),
        ({IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_schedule": "LoopedBFS"}, "PT823", "LoopedBFS"),
        ({IN + "pipeline_parallel_degree": 2, IN + "pipeline_parallel_schedule_csv": "a.csv"}, "PT823", "in a file"),
        ({"activation_checkpoint.mode": "memory_budget"}, "PT823", "memory_budget"),
        ({"activation_checkpoint.selective_ac_option": "some"}, "PT820", "some"),
        ({"training.dtype": "bfloat16"}, "PT823", "16 bits"),
        ({"training.mixed_precision_param": "int8"}, "PT823", "int8"),
        ({"model.converters": ["bitnet"]}, "PT823", "bitnet"),
        ({"optimizer.name": "Muon"}, "PT823", "Muon"),
        ({"optimizer.early_step_in_backward": True}, "PT823", "early"),
        ({"fault_tolerance.enable": True}, "PT823", "replicas"),
        ({"model.flavor": "9B"}, "PT822", "9B"),
        ({"training.seq_len": "long"}, "PT820", "long"),
        ({"compile.enable": "maybe"}, "PT820", "maybe"),
    ],
)
def test_contradictions_are_findings_with_their_line(change: dict[str, Any], code: str, says: str) -> None:
    found = [each for each in titan(change).findings if each.code == code]
    assert found, titan(change).findings
    assert says in found[0].message
    assert found[0].help
    assert found[0].span is not None
    line = toml(change).splitlines()[found[0].span.line - 1]
    assert any(name in line for name in change)


def test_what_nobody_knows_is_named_with_its_line() -> None:
    found = titan({"training.secret_token": "abcdef0123456789", "odd.table.key": 3})
    unknown = [fate for fate in found.fates if fate.kind == "not understood"]
    assert [fate.setting.name for fate in unknown] == ["training.secret_token", "odd.table.key"]
    lines = toml({"training.secret_token": "abcdef0123456789", "odd.table.key": 3}).splitlines()
    assert all(fate.setting.name in lines[fate.setting.line - 1] for fate in unknown)
    assert "abcdef0123456789" not in str(found.spec) + str(found.findings)


def test_old_names_mean_the_same() -> None:
    old = {
        "training.batch_size": 2, "training.local_batch_size": None, "training.data_parallel_shard_degree": -1,
        IN + "data_parallel_shard_degree": None, "training.data_parallel_replicate_degree": 1,
        IN + "data_parallel_replicate_degree": None, "training.compile": False, "compile.enable": None,
        "quantize.linear.float8.filter_fqns": ["output"],
    }  # fmt: skip
    assert titan(old).spec == titan({}).spec
    assert titan(old).understood == 1.0
    first = titan(old | {"experimental.pipeline_parallel_degree": 4, "training.batch_size": 8})
    assert at(first.spec, "parallel.micro_batch") == 2
    assert at(first.spec, "parallel.pipeline.layers") == [8, 8, 8, 8]


def test_layers_are_spread_as_torchtitan_does() -> None:
    assert spread(32, 4, 0, 0, 2) == [8, 8, 8, 8]
    assert spread(30, 4, 0, 0, 2) == [7, 8, 8, 7]
    assert spread(32, 4, 1, 1, 3) == [8, 9, 8, 7]
    assert spread(126, 16, 1, 1, 3) == [7, *[8] * 14, 7]


def test_every_flavour_is_a_preset_or_a_whole_model() -> None:
    presets = table("models")
    for flavours in FLAVOURS.values():
        for found in flavours.values():
            if isinstance(found, str):
                assert found in presets
            else:
                assert {"layers", "hidden", "heads", "vocab"} <= found.keys()
    known = {"8b": (32, 4096, 14336), "70b": (80, 8192, 28672), "405b": (126, 16384, 53248)}
    for size, sizes in known.items():
        fields = presets[str(FLAVOURS["llama3"][size])]["fields"]
        assert (fields["layers"], fields["hidden"], fields["ffn_hidden"]) == sizes


def test_no_setting_is_both_carried_and_without_effect() -> None:
    carried = {name for change, _, _ in CARRIED for name in change} | BASE.keys()
    found = titan(dict.fromkeys(NO_EFFECT, 1))
    own = {fate.setting.name for fate in found.fates if fate.kind == "carried" and fate.text[:10] != "optimizer."}
    both = own & NO_EFFECT.keys()
    assert not both
    assert carried & NO_EFFECT.keys() == {"job.dump_folder", "model.hf_assets_path", "optimizer.lr"}


RUN = """\
NGPU=${NGPU:-"8"}
CONFIG_FILE=${CONFIG_FILE:-"./configs/job.toml"}
overrides=""
if [ $# -ne 0 ]; then overrides="$*"; fi
PYTORCH_CUDA_ALLOC_CONF=x torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --local-ranks-filter 0 --role rank \\
    --tee 3 -m torchtitan.train --job.config_file ${CONFIG_FILE} $overrides --parallelism.tensor_parallel_degree=2 \\
    --training.seq_len 4096 --compile.enable --checkpoint.no_initial_load_model_only "$@"
"""


def test_options_of_a_script_count_over_its_configuration(tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "run.sh"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "job.toml").write_text(toml({}))
    found = read_files([(script, RUN)], "torchtitan", Wanted("h100-sxm"))
    assert errors(found) == []
    assert [each.message for each in found.findings if each.code == "PT825"] == [
        "the command has more options in $overrides, which only running the script would tell",
    ]
    assert found.understood == 1.0
    assert found.spec["hardware"] == {"nodes": 1, "per_node": 8, "accelerator": "h100-sxm"}
    assert at(found.spec, "parallel.tensor.degree") == 2
    assert at(found.spec, "parallel.compile") == "block"
    assert at(found.spec, "training.sequence_length") == 4096
    assert at(found.spec, "parallel.data.shard") == 4
    given = read_files([(Path("run.sh"), RUN), (Path("other/job.toml"), toml({}))], "torchtitan", Wanted("h100-sxm"))
    assert given.spec == found.spec


def test_a_configuration_that_is_not_there_is_a_finding() -> None:
    found = read(Path("run.sh"), RUN, "torchtitan", SIXTEEN)
    (missing,) = [each for each in found.findings if each.severity == "error" and each.code == "PT825"]
    assert "./configs/job.toml" in missing.message
    assert missing.span is not None
    assert missing.help
    starts = "NGPU=4 CONFIG_FILE=./job.toml ./run_train.sh --training.steps 5\n"
    found = read_files([(Path("go.sh"), starts), (Path("job.toml"), toml({}))], "torchtitan", Wanted("h100-sxm"))
    assert (errors(found), at(found.spec, "training.steps"), at(found.spec, "hardware.per_node")) == ([], 5, 4)


def test_values_that_only_a_shell_knows_are_findings() -> None:
    script = "torchrun --nproc_per_node 8 --nnodes $N -m torchtitan.train --model.flavor 8B --training.seq_len $LENGTH"
    found = read(Path("run.sh"), script, "torchtitan", Wanted("h100-sxm"))
    assert sorted(errors(found)) == ["PT822", "PT822", "PT825"]
    asked = {".".join(map(str, each.path)) for each in found.findings if each.code == "PT822"}
    assert asked == {"hardware.nodes", "training.global_batch"}
    found = read(Path("run.sh"), script.replace("$LENGTH", "2048"), "torchtitan", Wanted("h100-sxm", nodes=2))
    assert (errors(found), at(found.spec, "hardware.nodes")) == ([], 2)


def test_files_are_recognised_by_their_contents() -> None:
    assert (kind_of(toml({})), engine_of(toml({}))) == ("toml", "torchtitan")
    assert (kind_of(RUN), engine_of(RUN)) == ("script", "torchtitan")
    assert engine_of("[tool.ruff]\nline-length = 120\n") is None
    assert set(get_args(Engine)) == ENGINES.keys() - {"partool"}
    assert errors(read(Path("job.toml"), "[training\nsteps = 1", "torchtitan", SIXTEEN))[0] in ("PT820", "PT825")


def test_prices_are_those_of_torchtitan() -> None:
    """Compiled and eager runs have constants of their own, and nobody launches such a plan."""
    from partool.engines.imported import spec_text

    change = {
        "training.steps": 3,
        "training.seq_len": 4096,
        "parallelism.pipeline_parallel_degree": 2,
        "training.local_batch_size": 4,
    }
    eager = plan_of(spec_text(titan(change), Path("job.toml")))
    compiled = plan_of(spec_text(titan(change | {"compile.enable": True}), Path("job.toml")))
    assert (eager.engine, eager.runnable, eager.not_runnable) == ("torchtitan", False, ("PT826",))
    assert (eager.layout.data.zero, eager.layout.mesh.pp) == (3, 2)
    assert compiled.prediction.time.step_time_s < eager.prediction.time.step_time_s


REGISTRY = '''\
from torchtitan.trainer import Trainer
from . import model_registry


def llama3_8b() -> Trainer.Config:
    """A configuration."""
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        model_spec=model_registry("8B", attn_backend="sdpa"),
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"),
    )


def llama3_8b_float8() -> Trainer.Config:
    config = llama3_8b()
    config.model_converters = ModelConvertersContainer.Config(
        converters=[Float8LinearConverter.Config(enable_fsdp_float8_all_gather=False, filter_fqns=["output"])]
    )
    config.compile = CompileConfig(enable=True)
    config.training.steps = 7
    config.activation_checkpoint = ActivationCheckpointConfig(mode="full")
    return config


def computed() -> Trainer.Config:
    config = llama3_8b()
    config.training.seq_len = __import__("os").getpid()
    for name in ("a", "b"):
        print(name)
    return config
'''


def python(name: str | None) -> Imported:
    wanted = Wanted("h100-sxm", 1, 8, defined={"CONFIG": name} if name else {})
    return read(Path("config_registry.py"), REGISTRY, "torchtitan", wanted)


def test_functions_are_read_and_never_run() -> None:
    assert (kind_of(REGISTRY), engine_of(REGISTRY)) == ("python", "torchtitan")
    found = python("llama3_8b")
    assert (found.findings, found.understood) == ([], 1.0)
    assert found.spec["model"] == {"preset": "llama3.1-8b"}
    assert found.spec["training"] == {"sequence_length": 8192, "steps": 1000, "precision": "bf16", "global_batch": 4}
    assert at(found.spec, "parallel.tensor.degree") == 2
    assert at(found.spec, "parallel.recompute") == "selective"
    more = python("llama3_8b_float8")
    assert (more.findings, more.understood) == ([], 1.0)
    assert at(more.spec, "training.precision") == "fp8"
    assert (at(more.spec, "training.steps"), at(more.spec, "parallel.compile")) == (7, "block")
    assert at(more.spec, "parallel.recompute") == "full"


def test_lines_that_are_no_literals_are_findings() -> None:
    found = [each for each in python("computed").findings if each.code == "PT825"]
    assert ["training.seq_len" in found[0].message, "a line" in found[1].message] == [True, True]
    lines = REGISTRY.splitlines()
    places = [each.span.line for each in found if each.span is not None]
    assert ["getpid" in lines[places[0] - 1], "for name" in lines[places[1] - 1]] == [True, True]
    several = python(None).findings
    assert [each.code for each in several] == ["PT825"]
    assert "llama3_8b_float8" in several[0].help
    assert errors(python("other")) == ["PT825"]


def test_scripts_name_functions() -> None:
    script = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b --training.steps 9\n"
    files = [(Path("run.sh"), script), (Path("registry.py"), REGISTRY)]
    found = read_files(files, "torchtitan", Wanted("h100-sxm"))
    assert (found.findings, at(found.spec, "training.steps")) == ([], 9)
    alone = read_files(files[:1], "torchtitan", Wanted("h100-sxm"))
    assert [each.code for each in alone.findings if "config_registry.py" in each.message] == ["PT825"]


@pytest.mark.parametrize(("compiled", "published_gib"), [(False, 67.0), (True, 62.0)])
def test_memory_of_a_published_run_is_predicted(compiled: bool, published_gib: float) -> None:
    """Llama 3.1 8B on 128 H100: torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, table 3."""
    from partool.engines.imported import spec_text

    found = titan({"compile.enable": compiled}, Wanted("h100-sxm", 16, 8))
    memory = plan_of(spec_text(found, Path("job.toml"))).prediction.memory
    assert abs(memory.total_bytes / 2**30 / published_gib - 1) < 0.07


@given(
    st.dictionaries(
        st.sampled_from([*BASE, *(name for change, _, _ in CARRIED for name in change), "float8.filter_fqns"]),
        st.one_of(
            st.integers(-3, 10**10), st.floats(), st.text(max_size=5), st.booleans(), st.lists(st.text(max_size=3))
        ),
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_values_are_read(change: dict[str, Any]) -> None:
    lines = [f"{name} = {_toml_value(value)}" for name, value in (BASE | change).items() if value is not None]
    found = read(Path("job.toml"), "\n".join(lines), "torchtitan", SIXTEEN)
    assert found.spec or errors(found)


def _toml_value(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


@given(st.text(alphabet="def config=Trainer.Config(model_spec)\n :[]'\"", max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_text_is_read(text: str) -> None:
    for engine in ("torchtitan", "accelerate"):
        found = read(Path("file"), text, engine, SIXTEEN)  # type: ignore[arg-type]
        assert found.spec or errors(found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({IN + "tensor_parallel_degree": 2, IN + "disable_loss_parallel": True}, "the whole loss"),
        ({IN + "pipeline_parallel_degree": 2, IN + "fsdp_reshard_after_forward": "always"}, "each micro-batch"),
        ({IN + "pipeline_parallel_degree": 2, "training.global_batch_size": 64}, "runs empty"),
        ({"model.converters": ["mx"]}, "blocks of 32"),
        ({"model.converters": ["quantize.grouped_mm.float8"]}, "experts only"),
        ({"model.converters": ["float8"], "float8.filter_fqns": ["attention.wk"]}, "attention.wk"),
        ({"model.converters": ["float8"], "float8.enable_fsdp_float8_all_gather": True}, "gathered in 8 bits"),
        ({IN + "expert_parallel_comm_backend": "deepep"}, "deepep"),
        ({"experimental.custom_import": "mine"}, "not read"),
        ({"validation.enable": True}, "whole data set"),
    ],
)
def test_what_is_left_out_of_the_price_is_a_note(change: dict[str, Any], says: str) -> None:
    found = titan(change)
    assert (errors(found), found.understood) == ([], 1.0)
    assert [says in each.message for each in found.findings if each.code == "PT824"] == [True]
    assert not any(says in each.message for each in titan({}).findings)


def test_replicas_without_shards_have_whole_states() -> None:
    old = {"training.data_parallel_type": "ddp", "training.data_parallel_shard_degree": 16}
    found = titan(old | {IN + "data_parallel_shard_degree": None, IN + "data_parallel_replicate_degree": None})
    assert (errors(found), at(found.spec, "parallel.data")) == ([], {"zero": 0})
