"""``partool plan`` of files of other training systems: priced as they are, and what to change in their own words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from test_engines import CONFIG, SCRIPT
from typer.testing import CliRunner

from partool.cli import plan as plan_command

DEVICE = ("--set", "hardware.accelerator=h100-sxm")
SLOW = SCRIPT.rstrip("\n") + " --recompute-granularity full --recompute-method uniform\n"
TOLD = (
    *DEVICE, "--set", "hardware.per_node=8", "--set", "hardware.nodes=1", "--set", "model=llama3.2-1b",
    "--set", "training.sequence_length=2048",
)  # fmt: skip


def plan(*arguments: str | Path) -> tuple[int, str, str]:
    """Run ``partool plan``."""
    app = typer.Typer()
    app.command()(plan_command.command)
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    return done.exit_code, done.stdout, done.stderr


def test_a_script_is_planned_as_it_is_and_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    script = tmp_path / "train.sh"
    script.write_text(f"touch {canary}\nX=$(touch {canary})\n{SCRIPT}")
    code, text, told = plan(script, *DEVICE, "--output", "json")
    assert code == 0, told
    found = json.loads(text)
    assert found["spec"]["engine"] == "megatron"
    assert found["layout"]["tensor"]["degree"] == 4
    assert not canary.exists()
    assert "0123456789abcdef" not in text + told


def test_what_a_file_does_not_say_is_asked_for(tmp_path: Path) -> None:
    script, config = tmp_path / "train.sh", tmp_path / "ds.json"
    script.write_text(SCRIPT)
    config.write_text(json.dumps(CONFIG))
    code, text, told = plan(script)
    assert (code, text) == (1, "")
    assert "--set hardware.accelerator=VALUE" in told
    code, _, told = plan(config, *DEVICE)
    assert code == 1
    for path in ("hardware.per_node", "model.preset", "training.sequence_length"):
        assert f"--set {path}=VALUE" in told
    code, text, told = plan(config, *TOLD, "--output", "json")
    assert code == 0, told
    assert json.loads(text)["training"]["global_batch"] == 64
    for name, content in (("a.txt", "hello"), ("b.sh", "echo hello\n"), ("c.toml", "a = 1\n")):
        (tmp_path / name).write_text(content)
        code, text, told = plan(tmp_path / name)
        assert (code, text) == (1, ""), name
        assert "error[PT825]" in told
        assert (
            "is neither a spec nor a file of DeepSpeed, Megatron-LM, torchtitan or accelerate with FSDP or DDP"
            in " ".join(told.split())
        )
        assert "--num-layers" in told
    (tmp_path / "arguments.json").write_text('{"per_device_train_batch_size": 2, "bf16": true}')
    code, text, told = plan(tmp_path / "arguments.json", *DEVICE)
    assert (code, text, "error[PT822]" in told, "PT503" in told) == (1, "", True, False)
    (tmp_path / "d.json").write_text('{"a": 1}')
    code, text, told = plan(tmp_path / "d.json")
    assert (code, text, "partool_version" in told) == (1, "", False)
    assert "d.json is neither a plan nor a configuration of DeepSpeed or accelerate" in told


def accelerate_run(folder: Path) -> list[Path]:
    """Write the two files of a run with accelerate."""
    config, script = folder / "my fsdp.yaml", folder / "train.sh"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\n"
        "num_processes: 8\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n"
    )
    script.write_text(
        "accelerate launch --config_file 'my fsdp.yaml' own.py --per_device_train_batch_size 1 "
        "--gradient_accumulation_steps 4 --bf16 true --gradient_checkpointing true --max_length 2048\n"
    )
    return [config, script]


def test_files_of_one_run_are_planned_together(tmp_path: Path) -> None:
    files = accelerate_run(tmp_path)
    model = ("--set", "model=llama3.2-1b", "--set", "training.sequence_length=2048")
    code, text, told = plan(*files, *DEVICE, *model, "--output", "json")
    assert code == 0, told
    found = json.loads(text)
    assert (found["spec"]["engine"], found["devices"]["per_node"]) == ("accelerate", 8)
    assert (found["training"]["global_batch"], found["layout"]["data"]["zero"]) == (32, 3)
    code, text, told = plan(*files, *DEVICE, *model, "--improve")
    assert code == 0, told
    assert "add torch_compile true" in text
    assert "remove gradient_checkpointing   (train.sh, line 1)" in text
    spec = tmp_path / "mine.yaml"
    spec.write_text("spec: 1\n")
    code, _, told = plan(*files, spec, *DEVICE)
    assert (code, "one run of another training system" in " ".join(told.replace("│", "").split())) == (2, True)
    assert plan(*files, *DEVICE, "--smallest")[0] == 2


def test_findings_about_the_spec_say_whose_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    code, _, told = plan(script, *DEVICE, "--set", "training.global_batch=65")
    assert code == 1
    assert f"the spec that partool import makes of {script}:" in told


def test_settings_that_nobody_knows_are_warnings_at_their_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.rstrip("\n") + " --new-kind-of-thing 3\n")
    code, _, told = plan(script, *DEVICE, "--output", "json")
    assert code == 0
    assert "new-kind-of-thing is not understood" in told
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "new-kind" in text)
    assert f"train.sh:{line}:1" in told
    assert plan(script, *DEVICE, "--strict")[0] == 1


@pytest.mark.parametrize("change", ["training=5", "optimizer=5", "parallel=none"])
def test_sections_that_are_no_sections_are_errors_of_the_spec(change: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    code, text, told = plan(script, *DEVICE, "--set", change)
    assert (code, text) == (1, "")
    assert "error[PT10" in told


@pytest.mark.parametrize("held", [False, True])
def test_improvements_name_the_lines_of_the_file(held: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SLOW)
    options = ("--set", "parallel.recompute=full") if held else ()
    code, text, told = plan(script, *DEVICE, *options, "--improve")
    assert code == 0, told
    line = next(n for n, each in enumerate(SLOW.splitlines(), 1) if "--recompute" in each)
    assert (f"remove recompute-granularity   (line {line})" in text) != held
    assert text.startswith("as it is: ")


def test_a_configuration_that_does_not_fit_is_improved(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(CONFIG | {"zero_optimization": {"stage": 0}}, indent=1))
    told_8b = [each.replace("llama3.2-1b", "llama3-8b") for each in TOLD]
    assert plan(config, *told_8b)[0] == 1
    code, text, told = plan(config, *told_8b, "--improve")
    assert code == 0, told
    assert "as it is: " in text
    line = next(n for n, each in enumerate(config.read_text().splitlines(), 1) if "stage" in each)
    assert "zero_optimization.stage 0 → " in text
    assert f"(line {line})" in text
    assert "add train_micro_batch_size_per_gpu" not in text
    assert "better, and DeepSpeed can do it" in text
    code, text, told = plan(config, *told_8b, "--improve", "--output", "json", "--out", tmp_path / "plan.json")
    found = json.loads(text)
    assert (found["before"], found["worth_it"]) == (None, True)
    assert json.loads((tmp_path / "plan.json").read_text())["spec"]["engine"] == "deepspeed"
    assert plan(config, *told_8b, "--improve", "--smallest")[0] == 2


RECIPE = {"lr": 2e-05, "betas": [0.9, 0.98], "eps": 1e-09, "weight_decay": 0.05, "clip": 0.5}
SCHEDULE = {"kind": "cosine", "min_ratio": 0.2, "warmup_steps": 7}


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed", "megatron", "torchtitan"])
def test_rates_and_schedules_go_round(engine: str) -> None:
    """What a spec says of the optimizer is written, and read back."""
    from test_engine_terms import DENSE, TITAN, back, planned, spec_of

    text = spec_of(engine, TITAN if engine == "torchtitan" else DENSE)
    plan = planned(text + f"optimizer: {json.dumps({'name': 'adamw', **RECIPE, 'schedule': SCHEDULE})}\n")
    found = back(plan).spec["optimizer"]
    schedule = found.pop("schedule")
    assert found == {"name": "adamw", **RECIPE}
    assert schedule["kind"] == "cosine"
    assert schedule["min_ratio"] == pytest.approx(0.2)
    # DeepSpeed moves its rates one step late, so that its warm-up is written one step shorter.
    assert schedule["warmup_steps"] == 7 - (engine == "deepspeed")


def test_what_a_model_is_apart_from_its_sizes_is_carried() -> None:
    from test_engines import at, megatron

    found = megatron("--rotary-base 500000 --norm-epsilon 1e-6 --init-method-std 0.01 --use-rope-scaling")
    model = found.spec["model"]
    assert (model["rope_theta"], model["norm_eps"], model["init_std"]) == (500000, 1e-6, 0.01)
    assert model["rope_scaling"] == {"kind": "llama3", "factor": 8.0, "original_max_position": 8192}
    experts = "--num-experts 8 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3 --moe-router-topk-scaling-factor 2.5"
    moe = at(megatron(experts).spec, "model.moe")
    assert (moe["aux_loss"], moe["z_loss"], moe["scaling_factor"]) == (0.01, 1e-3, 2.5)
    open_ = megatron("--rotary-base $BASE --lr $LR")
    assert "rope_theta" not in open_.spec["model"]
    assert open_.findings == []


def test_lengths_of_warm_ups_are_in_steps() -> None:
    from test_engines import megatron

    samples = megatron("--lr-warmup-samples 640").spec["optimizer"]["schedule"]
    assert samples["warmup_steps"] == 10
    assert megatron("--lr-warmup-fraction 0.05").spec["optimizer"]["schedule"]["warmup_steps"] == 5
    assert megatron("--lr-decay-style inverse-square-root").spec["optimizer"] == {"name": "adamw", "lr": 3e-4}


def test_a_run_is_taken_from_one_system_to_another(tmp_path: Path) -> None:
    """What the second system cannot do is said, and a layout that it can do is found."""
    script, found = tmp_path / "train.sh", tmp_path / "plan.json"
    script.write_text(SCRIPT.replace("--vocab-size 128256", "--padded-vocab-size 128256"))
    spec = tmp_path / "mine.yaml"
    options = [*DEVICE, "--output", "json", "--out", found]
    from partool.engines import Wanted, read
    from partool.engines.imported import spec_text

    spec.write_text(spec_text(read(script, script.read_text(), "megatron", Wanted("h100-sxm")), script))
    code, _, told = plan(spec, "--set", "engine=accelerate", *options)
    assert (code, "PT828" in told or "PT828" in _) == (1, True)
    code, text, told = plan(spec, "--set", "engine=accelerate", "--improve", *options)
    assert code == 0, told
    assert "as it is: " in told
    assert json.loads(text)["engine"] == "accelerate"
    from partool.engines.write import terms_of
    from partool.plan.types import Plan

    taken = Plan.from_json(found.read_text())
    assert terms_of(taken).findings == []
    assert taken.optimizer.lr == 3e-4
