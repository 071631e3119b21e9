"""Files of DeepSpeed and Megatron-LM become specs of exactly their layout, priced with the engine's constants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import plan_of
from typer.testing import CliRunner

from partool.engines import Imported, Wanted, engine_of, read
from partool.engines.deepspeed_keys import no_effect
from partool.engines.megatron_keys import NO_EFFECT as OF_MEGATRON

SCRIPT = """\
#!/bin/bash
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
NODES=${NNODES:-2}
TP=4
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --vocab-size 128256
)
torchrun --nproc_per_node 8 --nnodes $NODES --master_addr $MASTER_ADDR pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 --sequence-parallel \\
    --use-distributed-optimizer --bf16 --micro-batch-size 1 --global-batch-size $((NODES * 32)) --train-iters 100 \\
    --data-path $DATA --lr 3e-4
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
}
H100 = Wanted("h100-sxm")
EIGHT = Wanted("h100-sxm", 1, 8, "llama3-8b", {"training.sequence_length": 4096})


def megatron(extra: str = "", script: str = SCRIPT, wanted: Wanted = H100) -> Imported:
    """Read the script with further arguments at its end."""
    return read(Path("train.sh"), script.rstrip("\n") + f" {extra}\n", "megatron", wanted)


def deepspeed(change: dict[str, Any], wanted: Wanted = EIGHT) -> Imported:
    """Read the configuration with some of its keys replaced."""
    return read(Path("ds.json"), json.dumps(CONFIG | change, indent=2), "deepspeed", wanted)


def at(spec: dict[str, Any], path: str) -> Any:
    """Return the value at a path of a spec."""
    found: Any = spec
    for name in path.split("."):
        found = found[name]
    return found


def errors(found: Imported) -> list[str]:
    """Return the codes of the findings that are errors."""
    return [each.code for each in found.findings if each.severity == "error"]


def test_a_script_is_read_whole() -> None:
    found = megatron()
    assert (found.findings, found.understood) == ([], 1.0)
    spec = found.spec
    assert spec["hardware"] == {"per_node": 8, "nodes": 2, "accelerator": "h100-sxm"}
    assert spec["training"] == {"sequence_length": 8192, "global_batch": 64, "steps": 100, "precision": "bf16"}
    assert at(spec, "parallel.pipeline") == {"stages": 2, "schedule": "1f1b", "layers": [16, 16]}
    assert at(spec, "parallel.tensor.degree") == 4
    assert at(spec, "parallel.data.zero") == 1
    assert at(spec, "model.kv_heads") == 8
    assert not any("api" in str(fate.setting.name).lower() for fate in found.fates)


def test_arguments_alone_and_commands_in_quotes_are_read() -> None:
    plain = megatron().spec
    begin, end = SCRIPT.index("    --num-layers"), SCRIPT.index(")\ntorchrun")
    rest = SCRIPT[SCRIPT.index("    --tensor-model") :].replace("\\\n", "\n").replace("$TP", "4")
    alone = SCRIPT[begin:end] + rest.replace("$((NODES * 32))", "64").replace("--data-path $DATA ", "")
    found = megatron(script=alone, wanted=Wanted("h100-sxm", 2, 8))
    assert (found.findings, found.spec) == ([], plain | {"hardware": found.spec["hardware"]})
    head, command = SCRIPT.split("torchrun", 1)
    whole = " ".join(command.replace("\\\n", " ").split())
    quoted = f'{head}RUN="torchrun {whole.replace("[@]", "[*]")}"\nsrun -l sh -c "$RUN"\n'
    assert read(Path("train.sh"), quoted, "megatron", H100).spec == plain


CARRIED = [
    ("--num-layers 16", "model.layers", 16),
    ("--kv-channels 64", "model.head_dim", 64),
    ("--num-query-groups 4", "model.kv_heads", 4),
    ("--padded-vocab-size 129024", "model.vocab", 129024),
    ("--normalization LayerNorm", "model.norm", "layernorm"),
    ("--position-embedding-type learned_absolute", "model.position", "learned"),
    ("--add-qkv-bias", "model.qkv_bias", True),
    ("--qk-layernorm", "model.qk_norm", True),
    ("--tensor-model-parallel-size 2", "parallel.tensor.degree", 2),
    ("--pipeline-model-parallel-size 4", "parallel.pipeline.stages", 4),
    ("--num-layers-per-virtual-pipeline-stage 4", "parallel.pipeline.chunks", 4),
    ("--num-virtual-stages-per-pipeline-rank 2", "parallel.pipeline.schedule", "interleaved"),
    ("--context-parallel-size 2", "parallel.sequence.method", "ring"),
    ("--context-parallel-size 2 --cp-comm-type a2a", "parallel.sequence.method", "ulysses"),
    ("--use-torch-fsdp2", "parallel.data.zero", 3),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel.data.zero", 2),
    ("--recompute-activations", "parallel.recompute", "attention"),
    ("--recompute-granularity full --recompute-method uniform", "parallel.recompute", "full"),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        "parallel.recompute",
        (["full"] * 3 + ["none"] * 13) * 2,
    ),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 0.75", "parallel.offload.gpu_fraction", 0.25),
    ("--fp8-format hybrid", "training.precision", "fp8"),
    ("--optimizer sgd", "optimizer.name", "sgd"),
    ("--micro-batch-size 2", "parallel.micro_batch", 2),
    ("--global-batch-size 128", "training.global_batch", 128),
    ("--seq-length 4096", "training.sequence_length", 4096),
    ("--train-samples 6400", "training.steps", 100),
    ("--eval-interval 50 --eval-iters 2", "training.validation.samples", 128),
    ("--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4", "parallel.expert", 4),
    ("--num-experts 8 --expert-tensor-parallel-size 1", "parallel.expert_tensor", 1),
    ("--num-experts 8 --moe-ffn-hidden-size 1792", "model.moe.ffn_hidden", 1792),
    ("--num-experts 8 --moe-layer-freq ([0]*3+[1]*29)", "model.moe.first_dense_layers", 3),
    ("--num-experts 8 --moe-layer-freq 2", "model.moe.every", 2),
    ("--num-experts 8 --moe-shared-expert-intermediate-size 28672", "model.moe.shared_experts", 2),
    ("--num-experts 8 --moe-router-score-function sigmoid", "model.moe.scores", "sigmoid"),
    ("--num-experts 8 --moe-expert-capacity-factor 1.5", "model.moe.capacity", 1.5),
    ("--multi-latent-attention --q-lora-rank 768 --kv-lora-rank 256", "model.mla.q_rank", 768),
    ("--multi-latent-attention --v-head-dim 96", "model.mla.v_head_dim", 96),
    ("--decoder-first-pipeline-num-layers 12", "parallel.pipeline.layers", [12, 20]),
    (
        "--pipeline-model-parallel-size 17 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        "parallel.pipeline.layers",
        [1, *[2] * 15, 1],
    ),
    (
        "--window-size 127,0 --window-attn-skip-freq 3",
        "model.attention",
        {"window": 128, "layer_types": {"pattern": ["sliding", "sliding", "full"]}},
    ),
    ("--num-experts 8", "parallel.expert_tensor", 4),
    ("--num-experts 8 --moe-router-force-load-balancing", "model.moe.routing", "balanced"),
    ("--num-experts 8 8 16 --expert-interval 10", "model.moe.layers", {"29": {"experts": 16}}),
    ("--num-experts 8 8 16 --expert-interval 10", "model.moe.first_dense_layers", 9),
    ("--num-experts 8 --deepspeed --zero-stage 2 --moe-train-capacity-factor 2.0", "model.moe.top_k", 1),
    ("--deepspeed --zero-stage 2", "parallel.data.zero", 2),
    ("--checkpoint-activations", "parallel.recompute", "full"),
    (
        "--recompute-granularity full --recompute-method block --num-layers-per-virtual-pipeline-stage 8",
        "parallel.recompute",
        (["full"] + ["none"] * 7) * 4,
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        "parallel.sequence",
        {"degree": 4, "method": "usp", "ulysses": 2},
    ),
    ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "parallel.data.zero", 2),
    ("--num-key-value-heads 2", "model.kv_heads", 2),
    ("--ds-sequence-parallel-size 2", "parallel.sequence.method", "ulysses"),
    ("--cpu-optimizer", "parallel.offload.optimizer", "cpu"),
    ("--checkpoint-in-cpu", "parallel.offload.activations", "cpu"),
    ("--pad-vocab-size-to 130048", "model.vocab", 130048),
    ("--hidden_size 8192", "model.hidden", 8192),
]


@pytest.mark.parametrize(("extra", "path", "value"), CARRIED, ids=[extra for extra, _, _ in CARRIED])
def test_arguments_are_carried(extra: str, path: str, value: Any) -> None:
    extra = extra.replace("([0]", "'([0]").replace("29)", "29)'")
    found = megatron(extra)
    assert (errors(found), found.understood) == ([], 1.0)
    assert at(found.spec, path) == value
    assert found.spec != megatron().spec or extra.startswith("--train-samples")


@pytest.mark.parametrize(
    ("extra", "code", "says"),
    [
        ("--fp16", "PT821", "both --bf16 and --fp16"),
        ("--num-layers-per-virtual-pipeline-stage 5", "PT821", "do not divide"),
        (
            "--num-layers-per-virtual-pipeline-stage 8 --num-virtual-stages-per-pipeline-rank 2",
            "PT821",
            "both --num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage",
        ),
        ("--recompute-granularity full", "PT821", "--recompute-method"),
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "PT823", "a2a+p2p"),
        ("--num-experts 8 --moe-layer-freq '([1]*3+[0]*29)'", "PT823", "moe-layer-freq"),
        ("--num-experts 8 --moe-layer-freq '__import__(1)'", "PT823", "moe-layer-freq"),
        ("--num-experts 8 16", "PT823", "2 numbers, and 32 of the 32 layers"),
        ("--num-experts 1 8 --expert-interval 16", "PT823", "has 1 beside other numbers"),
        ("--num-experts many 8 --expert-interval 16", "PT820", "num-experts has 'many'"),
        ("--micro-batch-size $MBS", "PT825", "$MBS"),
        ("--hidden-size wide", "PT820", "hidden-size"),
        ("--position-embedding-type relative", "PT823", "relative"),
        ("--normalization DeepNorm", "PT823", "DeepNorm"),
        ("--optimizer muon", "PT823", "muon"),
    ],
)
def test_contradictions_are_findings_with_their_line(extra: str, code: str, says: str) -> None:
    found = [each for each in megatron(extra).findings if each.code == code]
    assert found, megatron(extra).findings
    assert says in found[0].message
    assert found[0].help
    assert found[0].span is not None
    assert found[0].span.file == "train.sh"


@pytest.mark.parametrize(
    ("extra", "code", "severity"),
    [
        ("--mtp-num-layers 1", "PT823", "error"),
        ("--mtp-num-layers 0", None, None),
        ("--num-distributed-optimizer-instances 2", "PT823", "error"),
        ("--num-distributed-optimizer-instances 1", None, None),
        ("--hybrid-layer-pattern M-M-", "PT823", "error"),
        ("--fp8-format hybrid --fp8-param-gather", "PT824", "warning"),
        ("--exp-avg-dtype bf16", "PT824", "warning"),
        ("--exp-avg-dtype fp32", None, None),
        ("--recompute-granularity selective --recompute-modules core_attn moe", "PT824", "warning"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "PT824", "warning"),
        ("--qk-l2-norm", "PT824", "note"),
    ],
)
def test_what_changes_the_price_without_a_field_is_said(extra: str, code: str | None, severity: str | None) -> None:
    found = megatron(extra)
    assert {(each.code, each.severity) for each in found.findings} == ({(code, severity)} if code else set())
    assert found.understood == 1.0
    kinds = {fate.kind for fate in found.fates if fate.setting.name in extra}
    assert "recompute" in extra or ("not priced" in kinds) == (code is not None)


@pytest.mark.parametrize(
    ("removed", "added", "path", "value"),
    [
        ("--ffn-hidden-size 14336", "", "model.ffn_hidden", 10880),
        ("--ffn-hidden-size 14336 --swiglu", "", "model.ffn_hidden", 16384),
        ("--global-batch-size $((NODES * 32))", "", "training.global_batch", 2),
        ("--vocab-size 128256", "--tokenizer-type GPT2BPETokenizer", "model.vocab", 50688),
        ("--vocab-size 128256", "--tokenizer-type NullTokenizer --vocab-size 131071", "model.vocab", 131072),
        ("--use-distributed-optimizer", "", "parallel.data.zero", 0),
        ("--bf16", "--fp16", "training.precision", "fp16"),
        ("--bf16", "", "training.precision", "fp32"),
    ],
)
def test_defaults_are_those_of_megatron(removed: str, added: str, path: str, value: Any) -> None:
    script = SCRIPT
    for name in removed.split(" --"):
        script = script.replace("--" + name.removeprefix("--"), "")
    found = megatron(added, script)
    assert (errors(found), found.understood, at(found.spec, path)) == ([], 1.0, value)


def test_programs_around_the_script_say_nothing() -> None:
    """Options of what starts the script are not Megatron-LM's, and neither are those behind a pipe."""
    around = SCRIPT.replace("torchrun", "srun --output log.txt --seed 7 torchrun").rstrip("\n")
    found = read(Path("train.sh"), around + " 2>&1 | tee --append log.txt\n", "megatron", H100)
    assert (found.spec, found.fates) == (megatron().spec, found.fates)
    assert not {"output", "append"} & {fate.setting.name for fate in found.fates}
    assert "seed" not in {fate.setting.name: fate for fate in found.fates} or found.understood == 1.0


def test_slurm_says_which_machines_there_are() -> None:
    batch = "#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node=8\n" + SCRIPT.replace(
        "torchrun --nproc_per_node 8 --nnodes $NODES --master_addr $MASTER_ADDR", "srun python -u"
    ).replace("NODES=${NNODES:-2}", "NODES=$SLURM_NNODES")
    found = megatron(script=batch)
    assert (found.spec["hardware"], at(found.spec, "training.global_batch")) == (
        {"nodes": 4, "per_node": 8, "accelerator": "h100-sxm"},
        128,
    )


def test_models_of_other_kinds_are_errors() -> None:
    found = megatron(script=SCRIPT.replace("pretrain_gpt.py", "examples/pretrain_bert.py"))
    assert errors(found) == ["PT823"]


def test_what_nobody_knows_is_named() -> None:
    found = megatron("--new-kind-of-thing 3")
    (unknown,) = [fate for fate in found.fates if fate.kind == "not understood"]
    assert (unknown.setting.name, unknown.setting.value) == ("new-kind-of-thing", "3")
    assert found.understood < 1


def test_what_the_script_leaves_open_is_asked_for() -> None:
    bare = SCRIPT.replace("--vocab-size 128256", "--tokenizer-type HuggingFaceTokenizer").replace(
        "--nproc_per_node 8", ""
    )
    asked = {".".join(map(str, each.path)) for each in megatron(script=bare, wanted=Wanted()).findings}
    assert asked == {"model.vocab", "hardware.per_node", "hardware.accelerator"}
    told = Wanted("h100-sxm", per_node=4, settings={"model.vocab": 32000})
    found = megatron(script=bare, wanted=told)
    assert (found.findings, at(found.spec, "model.vocab"), at(found.spec, "hardware.per_node")) == ([], 32000, 4)


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ({}, "training.global_batch", 64),
        ({"train_batch_size": 64}, "parallel.micro_batch", 2),
        ({"train_batch_size": 128, "gradient_accumulation_steps": None}, "training.global_batch", 128),
        ({"zero_optimization": {"stage": 3}}, "parallel.data.zero", 3),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "parallel.offload.optimizer", "cpu"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}},
            "parallel.offload.dir",
            "/nvme",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}},
            "parallel.offload.gpu_fraction",
            0.75,
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "cpu"},
                    "offload_optimizer": {"device": "cpu"},
                }
            },
            "parallel.offload.parameters",
            "cpu",
        ),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "training.precision", "fp16"),
        ({"sequence_parallel_size": 2}, "parallel.sequence.method", "ulysses"),
        ({"tensor_parallel": {"autotp_size": 2}}, "parallel.tensor.degree", 2),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "parallel.offload.activations", "cpu"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.name", "lion"),
        ({"sequence_parallel_size": 2}, "training.global_batch", 32),
        ({"tensor_parallel": {"autotp_size": 4}}, "training.global_batch", 16),
        ({"zero_optimization": True}, "parallel.data.zero", 1),
        (
            {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e4}},
            "parallel.data.persistent",
            10000,
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": True, "cpu_offload": True}},
            "parallel.offload.parameters",
            "cpu",
        ),
        ({"compile": {"enabled": True}}, "parallel.compile", "block"),
        ({"curriculum_learning": {"enabled": False, "min_difficulty": 8}}, "parallel.data.zero", 2),
    ],
)
def test_keys_are_carried(change: dict[str, Any], path: str, value: Any) -> None:
    found = deepspeed(change)
    assert (errors(found), found.understood) == ([], 1.0)
    assert at(found.spec, path) == value


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"train_batch_size": 100}, "PT821", "train_batch_size 100"),
        ({"fp16": {"enabled": True}}, "PT821", "both bf16 and fp16"),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "PT821", "ZeRO-3 only"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "PT821", "ZeRO-0"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "PT822", "auto"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "PT823", "zero_hpz_partition_size"),
        ({"optimizer": {"type": "OneBitAdam"}}, "PT823", "onebitadam"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "PT823", "zero_quantized_weights"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "PT823", "bf16_master_weights"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "PT821", "ZeRO-3"),
    ],
)
def test_contradictory_keys_are_findings_with_their_line(change: dict[str, Any], code: str, says: str) -> None:
    found = [each for each in deepspeed(change).findings if each.code == code]
    assert found
    assert says in found[0].message
    assert found[0].help
    assert found[0].span is not None
    line = json.dumps(CONFIG | change, indent=2).splitlines()[found[0].span.line - 1]
    assert any(
        name in line
        for name in ("train_batch", "enabled", "device", "micro", "hpz", "type", "master", "ratio", "quant", "_b")
    )


def test_empty_sections_are_not_dropped_in_silence() -> None:
    empty = deepspeed({"zero_optimization": {"stage": 2, "offload_optimiser": {}}, "fp32": {}})
    unknown = [fate.setting.name for fate in empty.fates if fate.kind == "not understood"]
    assert unknown == ["zero_optimization.offload_optimiser", "fp32"]
    sections: dict[str, Any] = {name: {} for name in ("fp16", "bf16", "tensorboard", "autotuning", "scheduler")}
    sections["zero_optimization"] = {"stage": 2, "offload_optimizer": {}, "offload_param": {}}
    known = deepspeed(sections)
    assert (errors(known), known.understood) == ([], 1.0)
    assert known.spec["parallel"]["offload"]["optimizer"] == "none"


def test_sizes_are_those_of_json() -> None:
    """JSON has 5e8 and tabs where YAML has neither; DeepSpeed's own size of a buffer is no finding."""
    text = (
        '{\n\t"train_micro_batch_size_per_gpu": 2,\n\t"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}\n}'
    )
    found = read(Path("ds.json"), text, "deepspeed", EIGHT)
    assert (errors(found), at(found.spec, "training.global_batch")) == ([], 16)
    assert not [each for each in found.findings if "bucket" in each.message]
    other = deepspeed({"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "allgather_bucket_size": "auto"}})
    (said,) = [each for each in other.findings if "bucket" in each.message]
    assert (said.code, said.severity) == ("PT824", "note")
    assert "reduce_bucket_size" in said.message
    assert "allgather_bucket_size" in said.message


def test_a_file_without_json_is_a_finding() -> None:
    assert errors(read(Path("ds.json"), '{"a": [1,', "deepspeed", EIGHT))[0] == "PT820"
    for text in ("hello", "[1, 2]", ""):
        assert errors(read(Path("ds.json"), text, "deepspeed", EIGHT)) == ["PT820"]
    assert errors(read(Path("train.sh"), "echo hello", "megatron", H100)) == ["PT825"]
    assert engine_of("pip install torch") is None
    assert engine_of(SCRIPT) == "megatron"
    assert engine_of(json.dumps(CONFIG)) == "deepspeed"


def test_no_setting_is_both_carried_and_without_effect() -> None:
    other = deepspeed({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e4}})
    tables = (OF_MEGATRON, no_effect({fate.setting.name: fate.setting for fate in other.fates}))
    for found, table in zip((megatron("--num-experts 8"), other), tables, strict=True):
        assert table
        # Rates have a place in the spec and none in a price: where a file says them in other words, they are left out.
        carried = {
            fate.setting.name
            for fate in found.fates
            if fate.kind == "carried" and not fate.text.startswith("optimizer.")
        }
        assert carried
        assert not carried & table.keys()


def test_prices_are_those_of_the_engine(tmp_path: Path) -> None:
    """The same layout takes another time with other constants, and nobody launches it."""
    from partool.engines.imported import spec_text

    text = spec_text(megatron("--train-iters 3"), Path("train.sh"))
    theirs, ours = plan_of(text), plan_of(text.replace("engine: megatron", "engine: partool"))
    assert theirs.layout == ours.layout
    assert theirs.prediction.time.step_time_s != ours.prediction.time.step_time_s
    assert (theirs.engine, theirs.runnable, theirs.not_runnable) == ("megatron", False, ("PT826",))
    assert (ours.engine, ours.runnable) == ("partool", True)


def run(*arguments: str) -> tuple[int, str, str]:
    """Run the command."""
    import typer

    from partool.cli.import_ import command

    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_the_command_writes_a_spec_without_secrets(tmp_path: Path) -> None:
    script, out = tmp_path / "train.sh", tmp_path / "spec.yaml"
    script.write_text(SCRIPT.replace("--lr 3e-4", "--lr 3e-4 --wandb-token abcdef0123456789"))
    code, _, told = run(str(script), "--accelerator", "h100-sxm", "-o", str(out))
    assert code == 0, told
    assert "wandb-token is not understood" in told
    text = out.read_text()
    assert "engine: megatron" in text
    assert not any(secret in text + told for secret in ("0123456789abcdef", "abcdef0123456789"))
    assert plan_of(text).engine == "megatron"
    code, _, told = run(str(script), "--accelerator", "h100-sxm", "-o", str(out))
    assert (code, "is there already" in told) == (2, True)


@pytest.mark.parametrize(
    ("option", "name", "code", "near"),
    [("--accelerator", "h100-sxn", "PT260", "h100-sxm"), ("--model", "lama3-8b", "PT250", "llama3-8b")],
)
def test_names_that_the_catalog_lacks_are_refused(option: str, name: str, code: str, near: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    ended, written, told = run(str(script), "--accelerator", "h100-sxm", option, name)
    assert (ended, written) == (2, "")
    assert f"error[{code}]" in told
    assert f"did you mean {near}" in told


def test_the_next_command_is_quoted(tmp_path: Path) -> None:
    script, out = tmp_path / "train.sh", tmp_path / "my spec.yaml"
    script.write_text(SCRIPT)
    code, _, told = run(str(script), "--accelerator", "h100-sxm", "-o", str(out))
    assert code == 0, told
    assert f"next: partool plan '{out}'" in told


def test_the_command_asks_for_what_is_missing(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG))
    code, written, told = run(str(config))
    assert (code, written) == (1, "")
    for path in ("training.sequence_length", "hardware.accelerator", "hardware.per_node", "model.preset"):
        assert f"--set {path}=VALUE" in told
    options = ("--accelerator", "h100-sxm", "--nodes", "1", "--per-node", "8", "--model", "llama3.2-1b")
    code, written, told = run(str(config), *options, "--set", "training.sequence_length=4096")
    assert code == 0, told
    plan = plan_of(written)
    assert (plan.engine, plan.layout.data.zero, plan.training.global_batch) == ("deepspeed", 2, 64)


def test_hostile_configurations_are_read() -> None:
    loop = '{"train_batch_size": 64, "zero_optimization": &a {"stage": 1, "again": *a}, "list": &b [1, *b]}'
    for text in (loop, '{"train_batch_size": 64, "x": ' + "[" * 700 + "]" * 700 + "}"):
        found = read(Path("ds.json"), text, "deepspeed", EIGHT)
        assert found.findings or found.spec
