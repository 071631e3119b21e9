"""``partool doctor --target slurm``: a cluster's settings, and a plan against the cluster's resources."""

from __future__ import annotations

from pathlib import Path

import pytest
from _launch_case import launch_plan

from partool.launch.slurm import doctor as doctor_slurm
from partool.launch.slurm.doctor import checks, cluster_checks, folder_check, parse_config
from partool.launch.slurm.doctor_grace import grace_checks
from partool.launch.slurm.doctor_plan import nodes_check, parse_nodes, partition_checks, rights_check
from partool.launch.slurm.text import parse_record
from partool.launch.target import DoctorFiles

CONFIG = """\
Configuration data as of 2026-11-21T10:52:47
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = tiger
EnforcePartLimits       = ALL
KillWait                = 30 sec
MinJobAge               = 300 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SLURM_VERSION           = 22.05.8
SlurmctldHost[0]        = ctl(10.0.0.1)
SlurmctldParameters     = enable_configless,preempt_send_user_signal

Slurmctld(primary) at ctl is UP
"""
PARTITIONS = (
    "PartitionName=main AllowAccounts=ALL AllowQos=ALL Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 "
    "State=UP TotalNodes=3\n"
    "PartitionName=short AllowAccounts=ours,theirs AllowQos=ALL Default=NO MaxNodes=1 MaxTime=00:05:00 "
    "State=DRAIN TotalNodes=3\n"
)
NODES = """\
gpu1|gpu:h100:8(S:0-1)|192|2063000|idle
gpu2|gpu:h100:8(S:0-1)|192|2063000|mixed
gpu3|gpu:h100:8(S:0-1),nvme:1|192|2063000|down*
old1|gpu:a100:4|64|512000|idle
old1|gpu:a100:4|64|512000|idle
cpu1|(null)|64+|256000|idle
"""


def settings(**changes: str) -> dict[str, tuple[str, str]]:
    config = parse_config(CONFIG) | changes
    return {check.name: (check.verdict, check.text) for check in cluster_checks(config)}


def test_a_good_cluster() -> None:
    found = settings()
    assert found["version"] == ("ok", "22.05.8")
    assert found["accounting"] == ("ok", "accounting_storage/slurmdbd")
    assert found["preemption"] == ("ok", "REQUEUE, announced with the job's own signal")
    assert "limits" not in found


def test_settings_that_matter() -> None:
    old = settings(SLURM_VERSION="20.11.9", SlurmctldParameters="", EnforcePartLimits="NO")
    assert old["version"][0] == old["preemption"][0] == old["limits"][0] == "warning"
    assert "SIGTERM" in old["preemption"][1]
    new = list(cluster_checks(parse_config(CONFIG) | {"SLURM_VERSION": "24.11.1", "SlurmctldParameters": ""}))
    [preemption] = [check for check in new if check.name == "preemption"]
    assert "PreemptParameters=send_user_signal" in preemption.help
    assert settings(SLURM_VERSION="24.11.1", SlurmctldParameters="", PreemptParameters="send_user_signal")[
        "preemption"
    ] == ("ok", "REQUEUE, announced with the job's own signal")
    assert "300 sec" in settings(AccountingStorageType="accounting_storage/none")["accounting"][1]
    assert settings(PreemptType="preempt/none")["preemption"] == ("ok", "this cluster preempts no jobs")


@pytest.mark.parametrize(
    ("slurm", "nodes", "verdict", "words"),
    [
        ({}, 2, "ok", "main: at most 1-00:00:00, 3 nodes"),
        ({}, 4, "failed", "hardware.nodes is 4, it has 3"),
        ({"time": "2-0"}, 1, "failed", "launch.slurm.time is 2-0, the limit is 1-00:00:00"),
        ({"partition": "nope"}, 1, "failed", "there is no partition 'nope'"),
        ({"partition": "short", "account": "mine"}, 2, "failed", "it is DRAIN; hardware.nodes is 2, the limit is 1"),
        ({"partition": "short", "account": "mine"}, 1, "failed", "launch.slurm.account is mine; it takes ours,theirs"),
    ],
)
def test_partitions(
    monkeypatch: pytest.MonkeyPatch, slurm: dict[str, str], nodes: int, verdict: str, words: str
) -> None:
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    [check] = partition_checks(launch_plan(nodes=nodes, slurm=slurm), parse_record(PARTITIONS))
    assert check.verdict == verdict
    assert words in check.text
    assert check.verdict == "ok" or check.help


@pytest.mark.parametrize(
    ("slurm", "nodes", "verdict", "words"),
    [
        ({}, 2, "ok", "2 node(s) with 8 GPUs are up"),
        ({"gpu_type": "h100"}, 3, "warning", "only 2 are up now"),
        ({"gpu_type": "h200"}, 1, "failed", "0 node(s) have 8 GPUs of type h200"),
        ({}, 4, "failed", "3 node(s) have 8 GPUs; the plan wants 4"),
        ({"cpus_per_task": 193}, 1, "failed", "0 node(s) would do"),
    ],
)
def test_nodes(slurm: dict[str, str], nodes: int, verdict: str, words: str) -> None:
    found = parse_nodes(NODES)
    assert len(found) == 5
    check = nodes_check(launch_plan(nodes=nodes, slurm=slurm), found)
    assert check.verdict == verdict, check
    assert words in check.text


@pytest.mark.parametrize(
    ("account", "qos", "verdict", "words"),
    [
        ("ours", "long", "ok", "accounts ours, theirs"),
        (None, "short", "ok", "QOS long, normal, short"),
        ("mine", None, "failed", "no account mine; yours: ours, theirs"),
        ("theirs", "long", "failed", "no QOS long with account theirs; yours: short"),
    ],
)
def test_rights(account: str | None, qos: str | None, verdict: str, words: str) -> None:
    check = rights_check(account, qos, [["ours", "", "normal,long"], ["theirs", "gpu", "short"]])
    assert (check.verdict, words in check.text) == (verdict, True), check


def test_folders(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\nserver:/x /shared nfs4 rw 0 0\nfs /work\\040er fuse.beegfs rw 0 0\n")
    assert folder_check(Path("/shared/me/.partool"), mounts).verdict == "ok"
    assert folder_check(Path("/work er/me"), mounts).verdict == "ok"
    local = folder_check(Path("/home/me/.partool"), mounts)
    assert (local.verdict, "on / (ext4)" in local.text) == ("warning", True)


def test_no_slurm_but_a_script_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    script = "#!/bin/bash\n#SBATCH --gres=gpu:8\n#SBATCH --gpus-per-node=4\nsrun train\n#SBATCH --time=1\n"
    found = list(checks(None, DoctorFiles(script)))
    assert (found[0].name, found[0].verdict) == ("commands", "failed")
    assert "sbatch" in found[0].text
    assert len([check for check in found if check.name.startswith("script PT54")]) >= 2
    assert [check.name for check in found if check.name == "controller"] == []


def test_a_controller_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"
    for name in doctor_slurm._COMMANDS:
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    last = list(checks(None, DoctorFiles()))[-1]
    assert (last.name, last.verdict) == ("controller", "failed")
    assert "Unable to contact slurm controller" in last.text


@pytest.mark.parametrize(
    ("grace", "verdict", "text"),
    [
        ("PreemptMode=REQUEUE GraceTime=0", "warning", "a preempted job has 30 s (KillWait), and a stop may take 65 s"),
        (
            "PreemptMode=REQUEUE GraceTime=60",
            "warning",
            "a preempted job has 60 s (GraceTime), and a stop may take 65 s",
        ),
        (
            "PreemptMode=REQUEUE GraceTime=90",
            "ok",
            "a preempted job has 90 s (GraceTime), a step and its checkpoint may",
        ),
        ("PreemptMode=OFF GraceTime=0", "", ""),
    ],
)
def test_the_time_of_a_preempted_job(grace: str, verdict: str, text: str) -> None:
    plan = launch_plan()  # steps of 1 s, ± 100 %
    devices = plan.devices.model_copy(update={"storage_bytes_per_s": 8 * 2**30 / 62.5})
    memory = plan.prediction.memory.model_copy(update={"terms_bytes": {"parameters": 2**30}})
    prediction = plan.prediction.model_copy(update={"memory": memory})
    plan = plan.model_copy(update={"devices": devices, "prediction": prediction})
    [record] = parse_record(f"PartitionName=low {grace}")
    config = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "30 sec"}
    found = list(grace_checks(plan, config, record))
    assert [each.verdict for each in found] == [verdict] * bool(verdict)
    assert all(each.text.startswith(text) for each in found)
    assert all("all steps of the attempt" in each.help for each in found if verdict == "warning")
    assert not list(grace_checks(plan, config | {"PreemptType": "preempt/none"}, record))
