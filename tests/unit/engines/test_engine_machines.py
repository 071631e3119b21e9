"""How many machines a run of another system has: what its files say, and what the user says, must agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_engines import CONFIG, SCRIPT, run

from partool.engines import Imported, Wanted, read, read_files
from partool.engines.slurm import machines

BATCH = (
    "#!/bin/bash\n#SBATCH --nodes=4 --gpus-per-node=8\nsrun python pretrain_gpt.py --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --vocab-size 100\n"
)
TRAINER = (
    "train.py --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --max_seq_length 2048 --bf16 True\n"
)
TITAN = "-m torchtitan.train --model.flavor 8B --training.seq_len 2048\n"


def megatron(text: str, wanted: Wanted) -> Imported:
    return read(Path("train.sh"), text, "megatron", wanted)


def hardware(found: Imported) -> tuple[Any, Any]:
    return found.spec["hardware"].get("nodes"), found.spec["hardware"].get("per_node")


def errors(found: Imported) -> list[tuple[str, str]]:
    return [(each.code, ".".join(map(str, each.path))) for each in found.findings if each.severity == "error"]


@pytest.mark.parametrize("wanted", [Wanted("h100-sxm"), Wanted("h100-sxm", per_node=8), Wanted("h100-sxm", 4, 8)])
def test_an_option_adds_to_what_the_script_says(wanted: Wanted) -> None:
    found = megatron(BATCH, wanted)
    assert (errors(found), hardware(found)) == ([], (4, 8))
    assert found.spec["training"]["global_batch"] == 32


@pytest.mark.parametrize(
    ("wanted", "field", "says"),
    [
        (Wanted("h100-sxm", nodes=2), "hardware.nodes", "#SBATCH --nodes is 4, and --nodes is 2"),
        (Wanted("h100-sxm", per_node=4), "hardware.per_node", "#SBATCH --gpus-per-node is 8, and --per-node is 4"),
    ],
)
def test_an_option_that_contradicts_the_script_is_an_error_at_its_line(wanted: Wanted, field: str, says: str) -> None:
    found = megatron(BATCH, wanted)
    assert errors(found) == [("PT821", field)]
    (error,) = [each for each in found.findings if each.severity == "error"]
    assert (error.message, error.span.line if error.span else 0) == (says, 2)
    assert "--set hardware" in error.help


def test_a_field_that_is_set_counts_over_the_script_and_is_said() -> None:
    found = megatron(BATCH, Wanted("h100-sxm", settings={"hardware.nodes": 2}))
    assert (errors(found), hardware(found)) == ([], (2, 8))
    assert [each.severity for each in found.findings if "--set hardware.nodes=2 counts" in each.message] == ["note"]
    assert found.spec["training"]["global_batch"] == 16


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        (Wanted("h100-sxm"), {"hardware.nodes", "hardware.per_node"}),
        (Wanted("h100-sxm", per_node=8), {"hardware.nodes"}),
        (Wanted("h100-sxm", nodes=1), {"hardware.per_node"}),
        (Wanted("h100-sxm", 1, 8), set()),
    ],
)
def test_no_number_of_machines_is_assumed(wanted: Wanted, asked: set[str]) -> None:
    bare = BATCH.replace("#SBATCH --nodes=4 --gpus-per-node=8", "")
    config = read(
        Path("ds.json"),
        json.dumps(CONFIG),
        "deepspeed",
        Wanted(wanted.accelerator, wanted.nodes, wanted.per_node, "llama3-8b", {"training.sequence_length": 8}),
    )
    for found in (megatron(bare, wanted), config):
        missing = [each for each in found.findings if each.path[:1] == ("hardware",)]
        assert {".".join(map(str, each.path)) for each in missing} == asked
        for each in missing:
            assert f"--{str(each.path[1]).replace('_', '-')} NUMBER of partool import" in each.help


@pytest.mark.parametrize("engine", ["accelerate", "torchtitan"])
def test_every_script_is_asked_for_its_machines(engine: Any) -> None:
    end = TRAINER if engine == "accelerate" else TITAN

    def of(start: str, wanted: Wanted) -> Imported:
        return read_files([(Path("run.sh"), start + end)], engine, wanted)

    batch = "#SBATCH -N 4\n#SBATCH --gpus-per-node=8\n"
    srun = "srun torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES "
    assert hardware(of(batch + srun, Wanted("h100-sxm"))) == (4, 8)
    assert ("PT821", "hardware.nodes") in errors(of(batch + srun, Wanted("h100-sxm", nodes=1)))
    assert hardware(of("torchrun --nproc_per_node 8 ", Wanted("h100-sxm"))) == (1, 8)
    # Slurm starts it on four nodes, and each of them would train alone.
    alone = batch + "srun torchrun --nproc_per_node 8 "
    assert ("PT821", "hardware.nodes") in errors(of(alone, Wanted("h100-sxm")))
    settled = of(alone, Wanted("h100-sxm", settings={"hardware.nodes": 4}))
    assert (hardware(settled), "PT821" in [code for code, _ in errors(settled)]) == ((4, 8), False)
    opened = of("torchrun $ARGS ", Wanted("h100-sxm", per_node=8))
    assert ("PT822", "hardware.nodes") in errors(opened)


def test_processes_of_accelerate_are_divided_over_its_machines() -> None:
    start = "accelerate launch --num_processes 16 "
    found = read_files([(Path("run.sh"), start + "--num_machines 2 " + TRAINER)], "accelerate", Wanted("h100-sxm"))
    assert hardware(found) == (2, 8)
    found = read_files([(Path("run.sh"), start + TRAINER)], "accelerate", Wanted("h100-sxm", nodes=2))
    assert ("PT821", "hardware.nodes") in errors(found)
    deepspeed = read_files([(Path("run.sh"), "deepspeed " + TRAINER)], "accelerate", Wanted("h100-sxm"))
    assert {("PT822", "hardware.nodes"), ("PT822", "hardware.per_node")} <= set(errors(deepspeed))


def test_a_launcher_that_leaves_nodes_idle_is_a_warning() -> None:
    batch = "#SBATCH --nodes=4\n" + SCRIPT
    found = megatron(batch, Wanted("h100-sxm"))
    warned = [each for each in found.findings if each.code == "PT821"]
    assert (errors(found), hardware(found)) == ([], (2, 8))
    assert [(each.severity, each.message) for each in warned] == [("warning", "#SBATCH --nodes is 4, and nnodes is 2")]


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("--nodes=4 --gres=gpu:8", (4, 8)),
        ("--nodes 4 --gres=gpu:h100-sxm:8  # eight", (4, 8)),
        ("-N4 --gpus-per-node=h100:8", (4, 8)),
        ("-N 4 --ntasks-per-node=8 --gpus-per-node=8", (4, 8)),
        ("-N 4 -n 32", (4, 8)),
        ("-N 4 -G 32", (4, 8)),
        ("-N 4 -n 4", (4, None)),
        ("--nodes=2-4 --gres=gpu:8", (None, 8)),
        ("--nodes=some --gpus-per-node=8", (None, 8)),
        ("--nodes=99999999999999999999", (None, None)),
        ("--gpus=32", (None, None)),
    ],
)
def test_directives_of_slurm(line: str, want: tuple[int | None, int | None]) -> None:
    stated = machines(Path("a.sh"), f"#!/bin/bash\n#SBATCH {line}\n")
    found = {field: one.number for field, one in stated.items()}
    assert (found.get("nodes"), found.get("per_node")) == want
    assert all(one.span is not None and one.span.line == 2 for one in stated.values())


def test_the_command_says_which_option_to_give(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(BATCH)
    code, written, told = run(str(script), "--accelerator", "h100-sxm", "--per-node", "8")
    assert (code, "nodes: 4" in written) == (0, True), told
    code, written, told = run(str(script), "--accelerator", "h100-sxm", "--nodes", "2")
    assert (code, written, "error[PT821]" in told) == (1, "", True)
