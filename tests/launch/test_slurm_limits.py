"""Limits of accounts and QOS: what doctor calls impossible, a real Slurm with accounting never starts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from launch_helpers import wait_until
from planned import plan_of
from slurm_cluster import Cluster, unavailable, without_accounting
from slurm_runs import Login

from partool.launch.slurm.doctor import configuration
from partool.launch.slurm.doctor_plan import plan_checks
from partool.launch.target import Check
from partool.plan.types import Plan

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
SPEC = """
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
training: {global_batch: 64}
data: python-stdlib
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 8}
launch: {target: slurm, slurm: {partition: main, time: "60", account: plain}}
"""
ACCOUNTS = ("plain", "gpus GrpTRES=gres/gpu=8", "parent GrpTRES=node=1", "child parent=parent")
QOS = (
    "short MaxWall=00:30:00", "narrow MaxTRESPerNode=gres/gpu=4", "few MaxTRESPerJob=cpu=4",
    "mine MaxTRESPerUser=node=1", "wide GrpTRES=gres/gpu=32", "large MinTRESPerJob=gres/gpu=32", "none GrpJobs=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := unavailable() or without_accounting():
        pytest.skip(reason)
    with Cluster(nodes=2, accounting=True) as found:
        for each in QOS:
            found.run("sacctmgr", "-i", "add", "qos", *each.split())
        names = ",".join(["normal", *(each.split()[0] for each in QOS)])
        for each in ACCOUNTS:
            found.run("sacctmgr", "-i", "add", "account", *each.split())
            found.run("sacctmgr", "-i", "add", "user", "root", f"account={each.split()[0]}", f"qos={names}")
        yield found


def judged(cluster: Cluster, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return what doctor says about the limits on a plan."""
    monkeypatch.setenv("PATH", cluster.environment["PATH"])
    config = configuration()
    return next(check for check in plan_checks(plan, config) if check.name == "account limits")


def never_starts(cluster: Cluster, plan: Plan) -> bool:
    """Submit such a job to the empty cluster, and return whether a limit keeps it waiting."""
    slurm, devices = plan.launch.slurm, plan.devices
    options = [f"--nodes={devices.nodes}", f"--gpus-per-node={devices.per_node}", "--exclusive", "--mem=0"]
    options += [f"--{name}={value}" for name in ("account", "qos", "time") if (value := getattr(slurm, name))]
    job = cluster.run("sbatch", "--parsable", *options, "--output=/dev/null", "--wrap=sleep 60")
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            state, reason = cluster.run("squeue", "-h", "-j", job, "-o", "%T %r").split(maxsplit=1)
            if state == "RUNNING":
                return False
            if reason.startswith(("QOS", "Assoc")):
                return True
            time.sleep(0.3)
        raise AssertionError(f"{state}: {reason}")
    finally:
        cluster.run("scancel", job)
        wait_until(lambda: not cluster.jobs(), "an empty queue")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), ""),
        (("account=gpus",), "account gpus: GrpTRES of gres/gpu is 8, the job asks for 16"),
        (("account=child",), "account parent: GrpTRES of node is 1, the job asks for 2"),
        (("account=child", "nodes=1"), ""),
        (("qos=short",), "QOS short: MaxWall is 30 min, launch.slurm.time is 60 min"),
        (("qos=short", "time='29'"), ""),
        (("qos=narrow",), "QOS narrow: MaxTRESPerNode of gres/gpu is 4, the job asks for 8 on each node"),
        (("qos=few",), "QOS few: MaxTRES of cpu is 4, the job asks for 8"),
        (("qos=mine",), "QOS mine: MaxTRESPerUser of node is 1, the job asks for 2"),
        (("qos=large",), "QOS large: MinTRES of gres/gpu is 32, the job asks for 16"),
        (("qos=none",), "QOS none: GrpJobs is 0, which allows no job"),
        (("account=gpus", "qos=wide"), ""),  # the limit of the QOS replaces that of the account
    ],
)
def test_what_is_called_impossible_never_starts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], words: str
) -> None:
    plan = plan_of(SPEC, *(f"{'hardware' if 'nodes' in each else 'launch.slurm'}.{each}" for each in overrides))
    check = judged(cluster, plan, monkeypatch)
    assert check.verdict == ("failed" if words else "ok"), check
    assert words in check.text
    assert never_starts(cluster, plan) == bool(words)


def test_a_dry_run_ends_with_1(cluster: Cluster, tmp_path: object) -> None:
    login = Login(cluster, tmp_path)  # type: ignore[arg-type]
    file = login.folder / "spec.yaml"
    file.write_text(SPEC)
    arguments = ("launch", str(file), "--dry-run", "--set", "launch.slurm.account=gpus")
    done = login.partool(*arguments, code=1)
    assert "error[PT560]" in done.stderr + done.stdout
    assert "GrpTRES of gres/gpu is 8, the job asks for 16" in done.stderr + done.stdout
