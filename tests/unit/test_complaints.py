"""What users of other launchers complain of: one failing spec per complaint, with code, line and help.

Each case names the project and the thread (GitHub issue or pull request) it comes from.
"""

from __future__ import annotations

import pytest
from _spec_case import FIRST, findings, place, spec_text

from partool.spec import _pydantic

SLURM = "launch:\n  target: slurm\n"
K8S = "launch:\n  target: k8s\n  image: registry.example/train:1\n  k8s:\n    storage: pvc:runs\n"

COMPLAINTS: list[tuple[str, str, str, int, str]] = [
    # Keys that are ignored without a word: the most repeated complaint.
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
    # Sites and versions of Slurm differ.
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
    # Arithmetic of several nodes.
    (
        "Lightning #15011: several nodes, and nobody who starts them",
        "launch:\n  target: local\n", "PT524", 1, "slurm or k8s",
    ),
    # Gangs.
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
    assert set(_pydantic._ALIASES.values()) <= paths
    assert not set(_pydantic._ALIASES) & names


def test_one_node_with_sixteen_devices_is_doubted_with_the_nodes_to_write() -> None:
    """spd #524 asked for one node with 16 GPUs, and waited in the queue for ever."""
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
    assert [place(finding) for finding in found] == [("PT104", FIRST + 8)]
    found = findings(spec_text(section.replace("min_nodes: 0", "min_nodes: 1")))
    assert [place(finding) for finding in found] == [
        ("PT222", FIRST + 3),
        ("PT520", FIRST + 4),
        ("PT525", FIRST + 6),
        ("PT527", FIRST + 7),
    ]
    assert all(finding.help for finding in found)
