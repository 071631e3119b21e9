"""``partool doctor --target slurm``: a cluster's settings, and a plan against the cluster's resources."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _launch_case import launch_plan

from partool.launch.slurm import doctor as doctor_slurm
from partool.launch.slurm.doctor import checks, cluster_checks, folder_check, parse_config
from partool.launch.slurm.doctor_limits import JobRequest, LimitOwner, limit_checks, limits_check, request_of
from partool.launch.slurm.doctor_plan import grace_checks, nodes_check, parse_nodes, partition_checks, rights_check
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


REQUEST = JobRequest(2, {"gres/gpu": 8, "cpu": 64, "mem": 500_000}, wall_s=7200.0)


@pytest.mark.parametrize(
    ("owners", "safe", "words"),
    [
        ([("account", {"GrpTRES": "gres/gpu=16,node=2,cpu=128,mem=1000000"})], False, ""),
        ([("account", {"GrpTRES": "gres/gpu=8"})], False, "GrpTRES of gres/gpu is 8, the job asks for 16"),
        ([("account", {"GrpTRES": "mem=900G"})], False, "GrpTRES of mem is 921600 MiB, the job asks for 1e+06 MiB"),
        ([("user", {"MaxTRESPerNode": "gres/gpu=4"})], False, "is 4, the job asks for 8 on each node"),
        ([("user", {"MaxWall": "1:00:00"})], False, "MaxWall is 60 min, launch.slurm.time is 120 min"),
        ([("user", {"MaxWall": "1-00:00:00"})], False, ""),
        ([("user", {"MaxJobs": "0"})], False, "MaxJobs is 0, which allows no job"),
        ([("user", {"MaxJobs": "1", "MaxSubmit": ""})], False, ""),
        ([("user", {"MaxTRESMins": "gres/gpu=1000"})], False, "is 1,000, the job asks for 16 x 120 min"),
        ([("account", {"GrpTRESMins": "gres/gpu=1000"})], False, ""),  # it starts, and is stopped at the budget
        ([("account", {"GrpTRESMins": "gres/gpu=1000"})], True, "GrpTRESMins of gres/gpu is 1,000"),
        ([("qos", {"MinTRES": "gres/gpu=32"})], False, "MinTRES of gres/gpu is 32, the job asks for 16"),
        ([("qos", {"GrpTRES": "gres/gpu=32"}), ("account", {"GrpTRES": "gres/gpu=8"})], False, ""),
        ([("qos", {"GrpTRES": "cpu=999"}), ("account", {"GrpTRES": "gres/gpu=8"})], False, "account: GrpTRES"),
        ([("qos", {"MaxJobsPU": "3"}), ("user", {"MaxJobs": "0"})], False, ""),
        ([("qos", {"MaxTRES": "node=1"}), ("second qos", {"MaxTRES": "node=9"})], False, "qos: MaxTRES of node is 1"),
        ([("account", {"GrpTRES": "gres/gpu=99"}), ("parent", {"GrpTRES": "gres/gpu=8"})], False, "parent: GrpTRES"),
        ([("account", {"GrpTRES": "billing=1,license/x=0,energy=1"})], False, ""),  # what is not known is no reason
    ],
)
def test_limits_of_accounts_and_qos(owners: list[tuple[str, dict[str, str]]], safe: bool, words: str) -> None:
    found = [LimitOwner(title, limits, is_qos="qos" in title) for title, limits in owners]
    check = limits_check(found, REQUEST, safe=safe)
    assert check.verdict == ("failed" if words else "ok"), check
    assert words in check.text
    assert bool(check.help) == bool(words)


def test_a_plans_request() -> None:
    plan = launch_plan(nodes=2, slurm={"gpu_type": "h100", "time": "1-00:00:00"})
    asked = request_of(plan, cores=192, memory_mib=2_063_000)
    assert asked.total == {"node": 2, "gres/gpu": 16, "gres/gpu:h100": 16, "cpu": 384, "mem": 4_126_000}
    assert asked.wall_s == 86400
    shared = launch_plan(nodes=2, slurm={"exclusive": False, "gpus": "none", "memory": "100G", "cpus_per_task": 8})
    assert request_of(shared, cores=192, memory_mib=2_063_000).total == {"node": 2, "cpu": 16, "mem": 204_800}
    assert request_of(launch_plan(slurm={"exclusive": False}), 192, 1).total == {"node": 2, "gres/gpu": 16}


def test_limits_that_are_not_enforced_are_not_looked_up() -> None:
    [check] = limit_checks(launch_plan(), {"AccountingStorageEnforce": "associations"}, {}, REQUEST)
    assert check.verdict == "ok"
    assert "does not enforce" in check.text


def test_who_owns_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition's QOS, the job's, the user's association with the partition, its account, and those above it."""
    tool = tmp_path / "sacctmgr"
    tool.write_text(
        f"""#!{sys.executable}
import sys
words = dict(word.partition("=")[::2] for word in sys.argv[4:])
columns = words["format"].split(",")
def row(**values): print("|".join(values.get(name, "") for name in columns))
what = sys.argv[4]  # after --noheader --parsable2 show
if what == "user": row(DefaultAccount="ml")
elif what == "qos":
    assert sys.argv[5] == "ofpartition,day", sys.argv
    row(Name="day", Flags="DenyOnLimit", MaxWall="1-00:00:00")
    row(Name="ofpartition", GrpTRES="node=9")
elif words["user"]:
    row(Account=words["account"], User="me", QOS="day,normal", DefaultQOS="day", MaxJobs="5")
    row(Account=words["account"], User="me", Partition="gpu", QOS="day", DefaultQOS="day", MaxJobs="7")
    row(Account=words["account"], User="me", Partition="other", QOS="day", DefaultQOS="day", MaxJobs="0")
else:
    parent = {{"ml": "org", "org": "root"}}.get(words["account"], "")
    row(Account=words["account"], ParentName=parent, GrpTRES="node=4", MaxJobs="1")
"""
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("SBATCH_ACCOUNT", "SBATCH_QOS"):
        monkeypatch.delenv(name, raising=False)
    config = {"AccountingStorageEnforce": "associations,limits", "ClusterName": "tiger"}
    partition = {"PartitionName": "gpu", "QoS": "ofpartition"}
    [check] = limit_checks(launch_plan(), config, partition, REQUEST)
    assert check.verdict == "ok"
    titles = ["QOS ofpartition", "QOS day", "me in account ml", "account ml", "account org", "account root"]
    assert check.text == f"nothing is against the job in {', '.join(titles)}"


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
    memory = plan.prediction.memory.model_copy(update={"saved_bytes": 2**30})
    prediction = plan.prediction.model_copy(update={"memory": memory})
    plan = plan.model_copy(update={"devices": devices, "prediction": prediction})
    [record] = parse_record(f"PartitionName=low {grace}")
    config = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "30 sec"}
    found = list(grace_checks(plan, config, record))
    assert [each.verdict for each in found] == [verdict] * bool(verdict)
    assert all(each.text.startswith(text) for each in found)
    assert all("all steps of the attempt" in each.help for each in found if verdict == "warning")
    assert not list(grace_checks(plan, config | {"PreemptType": "preempt/none"}, record))
