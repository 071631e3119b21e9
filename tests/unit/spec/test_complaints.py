"""Complaints of users of other launchers: one failing spec per complaint, with code, line and help.

Each case names the project and the thread (GitHub issue or pull request) it comes from.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _spec_case import FIRST, findings, place, spec_text

from partool.planner import make_plan
from partool.spec import _aliases, _pydantic, load_text

SLURM = "launch:\n  target: slurm\n"
K8S = "launch:\n  target: k8s\n  image: registry.example/train:1\n  k8s:\n    storage: pvc:runs\n"

COMPLAINTS: list[tuple[str, str, str, int, str]] = [
    # Keys that are silently ignored: the most frequent complaint.
    ("torchx #1013: a typo cost hours", SLURM + "  slurm:\n    partiton: gpu\n", "PT101", 3, "mean `partition`?"),
    (
        "SkyPilot #674: num_workers was accepted, one node started",
        "launch:\n  num_workers: 4\n", "PT101", 1, "`hardware.nodes`",
    ),
    (
        "SkyPilot #4206: nothing checked what was below pod_config",
        K8S + "    tolerations:\n    - {key: gpu, operater: Exists}\n", "PT101", 6, "keys here: key, value, effect",
    ),
    ("unsloth #10452: keys at the wrong level were dropped", "launch:\n  nodes: 4\n", "PT101", 1, "`hardware`"),
    (
        "unsloth #10452, the other way round",
        "partition: gpu\n", "PT101", 0, "`partition` belongs under `launch.slurm`",
    ),
    (
        "LLaMA-Factory #5450: RANK was set, NODE_RANK was read",
        "launch:\n  env:\n    RANK: '1'\n", "PT222", 2, "hardware.nodes",
    ),
    (
        "LLaMA-Factory #5450: and NODE_RANK is not to be set by hand",
        "launch:\n  env:\n    NODE_RANK: '1'\n", "PT222", 2, "hardware.nodes",
    ),
    # Lock-in.
    (
        "NeMo-Run #169: pyxis was forced; here nothing starts an image unless it is named",
        SLURM + "  image: registry.example/train:1\n", "PT523", 2, "pyxis or apptainer",
    ),
    # Differences between sites and between versions of Slurm.
    (
        "torchx #1100: --gpus-per-task without --ntasks",
        SLURM + "  slurm:\n    options:\n      gpus-per-task: '1'\n", "PT525", 4, "launch.slurm.gpus",
    ),
    (
        "outerloop #176: some sites refuse --gpus",
        SLURM + "  slurm:\n    options:\n      gpus: '8'\n", "PT525", 4, "launch.slurm.gpus",
    ),
    (
        "pyxis #107: --container-image in the header moves the script into the container",
        SLURM + "  slurm:\n    options:\n      container-image: nvcr.io/x\n", "PT525", 4, "container: pyxis",
    ),
    (
        "axolotl #3038: a shell variable in an #SBATCH line stays as it is",
        SLURM + "  slurm:\n    partition: $PARTITION\n", "PT106", 3, "letters, digits",
    ),
    # Signals.
    (
        "submitit #1697: NCCL takes USR1; the signal is partool's to choose",
        SLURM + "  slurm:\n    options:\n      signal: USR1@120\n", "PT525", 4, "signal_lead_s",
    ),
    (
        "Automodel #405: a checkpoint on preemption needs its time",
        SLURM + "  shutdown_timeout_s: 300\n  slurm:\n    signal_lead_s: 120\n", "PT527", 4, "390 or more",
    ),
    # Jobs of several nodes.
    (
        "Lightning #15011: several nodes, and nobody who starts them",
        "launch:\n  target: local\n", "PT524", 1, "slurm or k8s",
    ),
    # Gang scheduling.
    (
        "Kueue #1476: a place in the topology is only kept by a queue",
        K8S + "    topology: {level: example.com/rack, required: true}\n", "PT528", 5, "queue: NAME",
    ),
    # Shared memory.
    ("NCCL #290: 64 MiB of /dev/shm", K8S + "    shared_memory: 64Mi\n", "PT528", 5, "8Gi or more"),
    (
        "Kubernetes #28272: shared memory counts against the limit, and the pod is evicted",
        K8S + "    memory: 32Gi\n    shared_memory: 64Gi\n", "PT528", 6, "raise memory",
    ),
    # Secrets.
    (
        "secrets end up in manifests and logs",
        "launch:\n  env:\n    WANDB_API_KEY: 01234abcde\n", "PT520", 2, "launch: {secrets:",
    ),
    # Rendering: hidden state of other tools.
    (
        "verl #3468: two masks of devices on ROCm",
        "launch:\n  env:\n    HIP_VISIBLE_DEVICES: '0'\n    ROCR_VISIBLE_DEVICES: '0'\n", "PT522", 3, "keep HIP",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("complaint", "section", "code", "line", "help"), COMPLAINTS, ids=lambda value: str(value)[:28]
)
def test_a_mistake_that_others_take_in_silence_is_shown(
    complaint: str, section: str, code: str, line: int, help: str
) -> None:
    nodes = 2 if "several nodes" in complaint else 1
    found = findings(spec_text(section, nodes=nodes))
    assert [place(finding) for finding in found] == [(code, FIRST + line)], complaint
    assert found[0].severity == "error" or code == "PT528"
    assert help in found[0].help


def test_names_of_other_tools_lead_to_what_there_is() -> None:
    paths = {_pydantic.dotted(path) for path in _pydantic.all_paths()}
    names = {path.rpartition(".")[2] for path in paths}
    assert set(_aliases.ALIASES.values()) <= paths
    assert set(_aliases.BESIDE.values()) <= names
    assert not (set(_aliases.ALIASES) | set(_aliases.NOTES)) & names
    for section, keys in _aliases.IN_SECTION.items():
        assert {f"{section}.{key}" for key in keys.values()} <= paths
        assert not {f"{section}.{key}" for key in keys} & paths


WORDS = [
    ("hardware: {accelerator: h100-sxm, memory: 80GB}", "write `memory_gib: 80`: the name ends with the unit"),
    ("hardware: {gpu: h100, per_node: 8}", "write `accelerator: h100`"),
    ("hardware: {gpu: 8}", "did you mean `per_node`?"),
    ("hardware: {type: h100}", "write `accelerator: h100`"),
    ("parallel: {dp: 8}", "nothing to write: data parallelism gets the devices that"),
    ("parallel: {data: 8}", "data: {shard: 8}"),
    ("parallel: {data: zero3}", "write data: {zero: 3}"),
    ("parallel: {zero_stage: 3}", "`parallel.data.zero`"),
    ("parallel: {tp: 8}", "`parallel.tensor`"),
    ("parallel: {pp: 8}", "`parallel.pipeline`"),
    ("parallel: {cp: 8}", "`parallel.sequence`"),
    ("parallel: {ep: 8}", "`parallel.expert`"),
    ("parallel: {data_parallel_shard_degree: 8}", "`parallel.data.shard`"),
    ("parallel: {sequence_parallel: true}", "write `parallel.tensor` for Megatron's"),
    ("training: {global_batch: 4M}", "it counts samples, not tokens: 1953 for 4,000,000 tokens of sequences of 2,048"),
    ("training: {global_batch: 4M, sequence_length: 8192}", "488 for 4,000,000 tokens of sequences of 8,192"),
    ("training: {global_batch: 1 Mi tokens, sequence_length: 4096}", "256 for 1,048,576 tokens of sequences of 4,096"),
    ("training: {bf16: true}", "write `training.precision`: bf16 (the default), fp16"),
    ("training: {per_device_train_batch_size: 4}", "`parallel.micro_batch`"),
    ("training: {micro_batch_size: 4}", "`parallel.micro_batch`"),
    ("training: {learning_rate: 1.0e-4}", "`optimizer.lr`"),
    ("training: {max_steps: 4}", "did you mean `steps`?"),
    ("training: {seq_len: 4}", "`training.sequence_length`"),
    ("training: {logging_steps: 4}", "`training.log_every`"),
    ("training: {output_dir: x}", "`checkpoint.dir` places checkpoints"),
    ("training: {train_samples: 100}", "write `training.steps`: the samples divided by"),
    ("training: {min_lr: 1.0e-5}", "`optimizer.schedule.min_ratio`"),
    ("training: {deepspeed: ds.json}", "partool import FILE"),
    ("optimizer: adamw_torch", "write optimizer: {name: adamw}"),
    ("optimizer: {type: adamw}", "write `name: adamw`"),
    ("checkpoint: {interval: 5}", "write `every: 5`"),
    ("checkpoint: {output_dir: x}", "write `dir: x`"),
    ("data: {path: x.txt}", "write `source: x.txt`"),
    ("model_name_or_path: x", "`model: {hf: FOLDER}`"),
    ("train_micro_batch_size_per_gpu: 4", "`parallel.micro_batch`"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "help"), WORDS, ids=[line for line, _ in WORDS])
def test_words_of_other_tools_are_answered_at_their_places(line: str, help: str) -> None:
    base = {"model": "gpt2", "hardware": "cpu", "data": "python-stdlib"}
    text = "".join(f"{key}: {value}\n" for key, value in base.items() if not line.startswith(f"{key}:")) + line + "\n"
    assert help in " ".join(finding.help for finding in load_text(text).diagnostics)


PLANNED = [
    ({"hardware": "NVIDIA H100 80GB HBM3"}, "PT260", "in the catalog this device is h100-sxm."),
    ({"hardware": "{accelerator: NVIDIA A100-SXM4-80GB}"}, "PT260", "in the catalog this device is a100-80."),
    ({"hardware": "{accelerator: NVIDIA GB200}"}, "PT260", "in the catalog this device is gb200."),
    ({"model": "./folder"}, "PT250", "for the model in a folder, write model: {hf: ./folder}"),
    ({"model": "config.json"}, "PT250", "write model: {config: config.json}"),
    ({"model": "meta-llama/Llama-3.1-8B"}, "PT250", "did you mean llama3.1-8b"),
    ({"model": "{config: gemma}"}, "PT252", "for others, write model: {hf: FOLDER OF THIS FILE}"),
    ({"model": "{config: google/gemma-2-9b}"}, "PT251", "hf download NAME config.json --local-dir DIR"),
    ({"data": "HuggingFaceFW/fineweb-edu"}, "PT601", "hf download HuggingFaceFW/fineweb-edu --repo-type dataset"),
    ({"data": "wikitext"}, "PT601", "then source: 'wikitext/**/*.parquet'"),
    ({"data": "{source: python-stdlib, tokenizer: gpt2}"}, "PT603", "hf download gpt2 tokenizer.json"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "code", "help"), PLANNED, ids=lambda value: str(value)[:50])
def test_names_of_devices_models_and_data_elsewhere_are_answered(
    tmp_path: Path, lines: dict[str, str], code: str, help: str
) -> None:
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "config.json").write_text('{"model_type": "gemma2"}', encoding="utf-8")
    model = "{layers: 2, hidden: 64, heads: 4, vocab: 256}"
    base = {"model": model, "hardware": "{accelerator: h100-sxm, per_node: 1}", "data": "python-stdlib"}
    spec = load_text("".join(f"{key}: {value}\n" for key, value in (base | lines).items())).spec
    assert spec is not None
    found = {finding.code: finding.help for finding in make_plan(spec, base_dir=tmp_path, default_name="x").diagnostics}
    assert help in found[code]


def test_one_node_with_sixteen_devices_is_doubted_with_the_nodes_to_write() -> None:
    """In spd #524 a job asked for one node with 16 GPUs and stayed in the queue for ever."""
    hardware = "{accelerator: h100-sxm, nodes: 1, per_node: 16}"
    [found] = findings(spec_text(SLURM, hardware=hardware))
    assert place(found) == ("PT524", 2)
    assert found.severity == "warning"
    assert "nodes: 2, per_node: 8" in found.help
    assert findings(spec_text("", hardware=hardware)) == []


def test_all_mistakes_come_in_one_run() -> None:
    """NeMo-Agent-Toolkit #2248, Dagster #26962: one error at a time, and without its line."""
    section = (
        "launch:\n  target: slurm\n  env:\n    RANK: '0'\n    HF_TOKEN: hf_secret\n"
        "  slurm:\n    options: {gres: 'gpu:8'}\n    signal_lead_s: 1\n  min_nodes: 0\n"
    )
    found = findings(spec_text(section))
    others = [("PT222", FIRST + 3), ("PT525", FIRST + 6), ("PT527", FIRST + 7)]
    assert sorted(place(finding) for finding in found) == [("PT104", FIRST + 8), *others]
    found = findings(spec_text(section.replace("min_nodes: 0", "min_nodes: 1")))
    assert [place(finding) for finding in found] == [others[0], ("PT520", FIRST + 4), *others[1:]]
    assert all(finding.help for finding in found)


BEHAVIOURS: list[tuple[str, str]] = [
    (
        "NeMo-Run #465: the plain script on stdout",
        "launch/test_launch_cluster.py::test_render_prints_what_launch_submits",
    ),
    ("srt-slurm #190: mounts and variables with their origin", "unit/render/test_render_slurm.py::test_golden"),
    ("srt-slurm #190, on Kubernetes", "unit/render/test_render_k8s_pods.py::test_every_variable_has_an_origin"),
    (
        "torchx #660, #822: Volcano was forced, Kueue was missing",
        "unit/render/test_render_k8s_pods.py::test_queue_and_priority",
    ),
    ("NeMo-Run #169: pyxis was forced", "unit/render/test_render_slurm.py::test_apptainer_gets_what_the_run_needs"),
    ("torchx #1101: crash on another version's JSON", "unit/launch/test_slurm_text.py::test_queue"),
    ("DeepSpeed #8304: an option of srun that never was", "launch/test_slurm_cluster.py::test_to_the_end"),
    (
        "accelerate #2816, #1645: every node thought it was the first",
        "unit/render/test_render_lint.py::test_unsound_scripts",
    ),
    (
        "pytorch #73656, #79388, #150532: who hosts the store",
        "unit/runtime/agent/test_runtime_nodes.py::test_node_0_says_if_the_host_is_another_machine",
    ),
    (
        "pytorch #73682: a miss of DNS was fatal",
        "unit/runtime/agent/test_runtime_nodes.py::test_node_0_is_waited_for_and_why_it_is_not_there",
    ),
    ("pith-train #91: || echo localhost", "unit/render/test_render_slurm.py::test_no_head_node_no_job"),
    ("pytorch #154849: USR1 orphaned the workers", "launch/test_agent_signals.py::test_stop_signals"),
    (
        "accelerate #1918: the launcher hid Slurm's signals",
        "launch/test_slurm_cluster.py::test_preempted_and_resumed_exactly",
    ),
    ("Automodel #3007: a checkpoint on preemption", "launch/test_slurm_cluster.py::test_preempted_and_resumed_exactly"),
    ("torchforge #528: LOCAL_RANK was RANK", "parity/test_several_nodes.py::test_two_nodes_equal_one_process"),
    (
        "Kueue #2796, JobSet #621: half a gang",
        "unit/render/test_render_k8s_restarts.py::test_a_jobset_restarts_as_a_whole",
    ),
    (
        "trainer #2000: one pod came back alone",
        "launch/test_k8s_gang_restart.py::test_a_failure_and_a_preemption_restart_all_pods",
    ),
    ("NCCL #525: 64 MiB of /dev/shm", "unit/render/test_render_k8s_pods.py::test_volumes"),
]  # fmt: skip
"""Complaints that no single spec can show, with the tests that cover them."""


@pytest.mark.parametrize(("complaint", "test"), BEHAVIOURS)
def test_what_others_lack_is_tested(complaint: str, test: str) -> None:
    file, _, name = test.partition("::")
    text = (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in text, complaint


def test_empty_text_is_called_empty() -> None:
    text = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\ndata: {source: a, special_tokens: ['']}\n"
    (finding,) = [one for one in load_text(text).diagnostics if one.code == "PT102"]
    assert finding.message == "`data.special_tokens[0]` must be text that is not empty, not ''"
