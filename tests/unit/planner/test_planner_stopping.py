"""The time that a stop needs, and the values that a plan decides from it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer
from _k8s_case import k8s_plan, pods
from _launch_case import launch_job, launch_plan
from planned import plan_of
from typer.testing import CliRunner

from partool.cli import render as render_command
from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.planner.elastic import resized
from partool.planner.findings.stopping import check_decided, check_restarts
from partool.planner.stopping import decided, forecast, stopping_of, worst_loss
from partool.render.job import Job
from partool.render.render import render
from partool.report.plan_rows import saves_text, stop_text
from partool.spec.launch import LaunchSpec
from partool.spec.targets.k8s.notices import notice
from partool.spec.targets.k8s.section import K8sSpec
from partool.spec.targets.slurm.rules import lead_s
from partool.spec.training import CheckpointSpec, OptimizerSpec

GIB = 1 << 30
LARGE = """\
model: llama3-70b
hardware: {accelerator: h100-sxm, nodes: 8}
training: {sequence_length: 8192, global_batch: 512, steps: 20000}
data: {source: /data/tokens/*.bin}
parallel:
  tensor: 4
  pipeline: {stages: 8, schedule: interleaved, chunks: 5}
  data: {zero: 1}
  micro_batch: 1
  recompute: [LAYERS]
launch: {target: slurm, slurm: {partition: gpu, time: 1-00:00:00}}
""".replace("LAYERS", ", ".join(["full", "none"] * 40))


@pytest.fixture(scope="module")
def large() -> Plan:
    """Return README's plan of a model of 70 billion parameters on 64 devices."""
    return plan_of(LARGE, name="llama3-70b-h100")


def timed(plan: Plan, step_s: float, state_bytes: int, *, total_s: float = 1e6, **terms_s: float) -> Plan:
    """Return a plan with these predictions, whose step time has an error of 25 %; each rank writes ``state_bytes``."""
    time = plan.prediction.time.model_copy(update={"step_time_s": step_s, "total_s": total_s, "terms_s": terms_s})
    memory = plan.prediction.memory.model_copy(update={"saved_bytes": state_bytes})
    update = {"time": time, "memory": memory, "relative_error": 0.25}
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=update)})


def asked(plan: Plan, **launch: Any) -> Plan:
    """Return the plan of a spec that has these fields in ``launch``, as decided."""
    spec = {"launch": launch, "checkpoint": plan.spec.get("checkpoint", {})}
    section = LaunchSpec.model_validate({"target": plan.launch.target, **launch})
    return decided(plan.model_copy(update={"spec": spec, "launch": section}))


def found(plan: Plan) -> list[Diagnostic]:
    return [one for one in check_decided(plan.launch, forecast(plan)) if one.code in ("PT340", "PT341", "PT527")]


def test_the_window_of_a_large_plan(large: Plan) -> None:
    """README's plan: 78.7 s a step, ± 25 %, (4.47 + 8.95) GiB of state per rank, 1 GB/s per node."""
    stopping = large.stopping
    assert stopping is not None
    assert large.prediction.time.step_time_s == pytest.approx(78.6, abs=0.1)
    assert stopping.step_s == pytest.approx(99.5, abs=0.2)
    assert stopping.checkpoint_bytes / GIB == pytest.approx(8 * (4.47 + 8.95), rel=1e-3)
    assert stopping.write_s == pytest.approx(stopping.checkpoint_bytes / 1e9)
    assert large.checkpoint.every == "30min"
    assert stopping.writes == 2  # the checkpoint that 30 minutes have begun, and then that of the stop
    assert stopping.needed_s == pytest.approx(99.5 + 2 * 115.3, abs=1)
    assert large.launch.shutdown_timeout_s == 360
    assert "shutdown_timeout_s" not in large.spec["launch"]
    assert "checkpoint" not in large.spec
    assert saves_text(large) == "every 30min, the last 3 kept (auto: over 1 h)"
    assert "within 360 s: a step 99 s, a checkpoint of 107 GiB per node 2 × 115 s at 1 GB/s" in stop_text(large)
    assert "a shorter notice (spot) loses up to 30min of training" in stop_text(large)


def test_rendered_jobs_give_a_stop_the_planned_time(large: Plan) -> None:
    job = Job(large, "llama-12345678", PurePosixPath("/shared/runs/llama-12345678"))
    script = render("slurm", job).text
    assert "#SBATCH --signal=B:USR2@450\n" in script  # 360 s, and 90 s for Slurm and the agents
    assert "--wait=480 " in script
    pods_of = k8s_plan().launch
    plan = large.model_copy(update={"launch": pods_of.model_copy(update={"shutdown_timeout_s": 330})})
    graces = [template["spec"]["terminationGracePeriodSeconds"] for _, template in pods(launch_job(plan))]
    assert set(graces) == {360}


def test_requeues_are_said_to_go_on_from_what_is_saved(large: Plan) -> None:
    [note] = found(large)
    assert (note.code, note.severity) == ("PT527", "note")
    assert "requeued 18 times" in note.message
    assert "each job saves its state before its limit" in note.help
    short = asked(large, shutdown_timeout_s=60, slurm={"partition": "gpu", "time": "1-00:00:00"})
    window, limit = found(short)
    assert (window.code, window.severity, window.path) == ("PT340", "warning", ("launch", "shutdown_timeout_s"))
    assert "shutdown_timeout_s: 60 is shorter" in window.message
    assert "a step 99 s, a checkpoint of 107 GiB per node 2 × 115 s" in window.message
    assert "360 or more" in window.help
    assert "up to 30min of training" in window.help
    assert "goes on from its last checkpoint" in limit.help
    never = short.model_copy(update={"checkpoint": CheckpointSpec(every=0)})
    window, limit = found(never)
    assert "all steps of the attempt" in window.help
    assert (limit.severity, "no job may save its state" in limit.help) == ("warning", True)


def test_a_written_signal_bounds_the_window_and_is_compared(large: Plan) -> None:
    plan = asked(large, slurm={"partition": "gpu", "time": "3-00:00:00", "signal_lead_s": 150})
    assert plan.launch.shutdown_timeout_s == 120  # the agents say what was lost before the job ends
    late, _ = found(plan)
    assert (late.code, late.path) == ("PT340", ("launch", "slurm", "signal_lead_s"))
    assert "use 450" in late.help
    enough = asked(large, slurm={"partition": "gpu", "time": "3-00:00:00", "signal_lead_s": 450})
    assert enough.launch.shutdown_timeout_s == 360
    assert [one.code for one in found(enough)] == ["PT527"]


def test_a_limit_shorter_than_the_signal_is_an_error(large: Plan) -> None:
    plan = asked(large, slurm={"partition": "gpu", "time": "2:30"})
    error = next(one for one in found(plan) if one.severity == "error")
    assert "time: 2:30 is 150 s, and the run is signalled to stop 150 s before it ends" in error.message
    longer = asked(large, slurm={"partition": "gpu", "time": "2:31"})
    assert "error" not in {one.severity for one in found(longer)}


def test_a_stop_that_slurm_cannot_announce_early_enough() -> None:
    plan = asked(timed(launch_plan(), 60_000.0, GIB), slurm={"partition": "gpu", "time": "9-00:00:00"})
    assert (plan.launch.shutdown_timeout_s, lead_s(plan.launch)) == (65445, 65535)
    assert "#SBATCH --signal=B:USR2@65535" in render("slurm", launch_job(plan)).text
    finding = found(plan)[0]
    assert (finding.code, finding.path) == ("PT340", ("launch", "slurm"))
    assert "65,535 s before its limit" in finding.message
    here = asked(plan.model_copy(update={"launch": LaunchSpec()}), target="local")
    assert here.launch.shutdown_timeout_s > 75_000
    assert found(here) == []


def test_short_jobs_are_not_all_stop() -> None:
    """A window that would take most of a job's time limit is cut, and that is said where the run needs a second job."""
    plan = timed(launch_plan(), 97.0, GIB, total_s=5000.0)
    assert asked(plan, slurm={"partition": "gpu", "time": "1:00:00"}).launch.shutdown_timeout_s == 150
    short = asked(plan, slurm={"partition": "gpu", "time": "0:05:00"})
    assert (short.launch.shutdown_timeout_s, lead_s(short.launch)) == (60, 150)
    assert [(one.code, one.severity) for one in found(short)] == [("PT340", "warning"), ("PT527", "warning")]
    assert found(short)[0].message.startswith("time: 0:05:00 is short")
    ends = asked(timed(launch_plan(), 97.0, GIB, total_s=120.0), slurm={"partition": "gpu", "time": "0:05:00"})
    assert found(ends) == []


def test_restarts_of_a_short_run_are_told_to_begin_anew() -> None:
    plan = decided(timed(launch_plan(), 1.0, GIB, total_s=60.0))
    plan = plan.model_copy(update={"launch": plan.launch.model_copy(update={"restarts": 2})})
    assert [(one.code, one.severity) for one in check_restarts(plan)] == [("PT227", "note")]
    for written in ({"every": 0}, {"every": 5}):  # rules of the spec judge what is written
        assert list(check_restarts(plan.model_copy(update={"spec": {"checkpoint": written}}))) == []


def test_small_runs_keep_a_minute() -> None:
    plan = asked(timed(launch_plan(), 0.05, 1 << 20, total_s=90.0))
    assert plan.stopping is not None
    assert plan.stopping.needed_s == 1
    assert (plan.launch.shutdown_timeout_s, plan.checkpoint.every) == (60, 0)
    assert not [one for one in found(asked(plan, shutdown_timeout_s=2)) if one.code == "PT340"]


@pytest.mark.parametrize(("total_s", "every"), [(3600.0, 0), (3601.0, "30min")])
def test_runs_of_more_than_an_hour_write_checkpoints(total_s: float, every: int | str) -> None:
    plan = timed(launch_plan(), 1.0, GIB, total_s=total_s)
    assert decided(plan).checkpoint.every == every
    for written in (0, 7, "2h"):
        section = plan.checkpoint.model_copy(update={"every": written})
        kept = decided(plan.model_copy(update={"checkpoint": section, "spec": {"checkpoint": {"every": written}}}))
        assert kept.checkpoint.every == written


def test_parts_of_a_stop() -> None:
    plan = timed(launch_plan(), 8.0, GIB, forward=7.0, optimizer=0.4, offload=0.4)
    saving = plan.model_copy(update={"checkpoint": CheckpointSpec(every=5, mode="async")})
    assert stopping_of(plan).step_s == pytest.approx(1.25 * 8.8)  # a signal just after the ranks have agreed
    assert (stopping_of(plan).writes, stopping_of(saving).writes) == (1, 2)
    in_turn = plan.model_copy(update={"checkpoint": CheckpointSpec(every=5, mode="sync")})
    assert stopping_of(in_turn).writes == 1
    rarely = plan.model_copy(update={"optimizer": OptimizerSpec(name="zero_one_adam")})
    assert stopping_of(rarely).steps == 16
    slow = plan.devices.model_copy(update={"storage_bytes_per_s": 1e8})
    assert stopping_of(plan.model_copy(update={"devices": slow})).write_s == pytest.approx(80 * GIB / 1e9, rel=1e-6)


def test_fewer_nodes_write_more_and_the_job_gives_the_longest_time() -> None:
    small = "model: {layers: 2, hidden: 512, heads: 8, vocab: 1024}\ndata: python-stdlib\n"
    machines = "hardware: {accelerator: h100-sxm, nodes: 4, storage_gb_per_s: 0.0003}\n"
    job = "launch: {target: slurm, min_nodes: 2}\nparallel: {data: {zero: 1}, tensor: 1, pipeline: 1, sequence: 1}\n"
    plan = plan_of(small + machines + job)
    smaller = resized(plan, 2)
    assert isinstance(smaller, Plan)
    assert smaller.launch.window_s > plan.launch.window_s > 60
    script = render("slurm", launch_job(plan, sizes={2: smaller})).text
    assert f"--signal=B:USR2@{smaller.launch.window_s + 90}\n" in script
    assert f"--wait={smaller.launch.window_s + 120} " in script


def test_tasks_of_an_array_may_need_other_times(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "model: {layers: 2, hidden: 512, heads: 8, vocab: 1024}\ndata: python-stdlib\n"
        "hardware: {accelerator: h100-sxm, per_node: 2, storage_gb_per_s: 0.0003}\nlaunch: {target: slurm}\n"
        "parallel: {data: {zero: 1}, tensor: 1, pipeline: 1, sequence: 1}\n"
    )
    array = ["--array", "model.layers=2,8", "-o", str(tmp_path / "out")]
    app = typer.Typer()
    app.command()(render_command.command)
    ran = CliRunner().invoke(app, [str(spec), *array])
    assert ran.exit_code == 0, ran.output
    windows = []
    for number in range(2):
        [file] = (tmp_path / "out").rglob(f"task-{number}/plan.json")
        windows.append(Plan.from_json(file.read_text()).launch.window_s)
    assert windows[0] < windows[1]
    [script] = (tmp_path / "out").rglob("job.sbatch")
    assert f"--signal=B:USR2@{windows[1] + 90}\n" in script.read_text()


def test_machines_that_clouds_take_back() -> None:
    def section(**fields: Any) -> K8sSpec:
        return K8sSpec.model_validate(fields)

    assert notice(section()) is None
    assert notice(section(node_selector={"cloud.google.com/gke-spot": "false"})) is None
    aws = section(node_selector={"eks.amazonaws.com/capacityType": "SPOT"})
    azure = section(node_selector=aws.node_selector, tolerations=[{"key": "kubernetes.azure.com/scalesetpriority"}])
    assert [each.seconds for each in map(notice, (aws, azure)) if each is not None] == [120, 30]
    plan = timed(k8s_plan(k8s={"storage": "pvc:runs", "node_selector": aws.node_selector}), 100.0, GIB)
    section_of = {"checkpoint": CheckpointSpec(every="10min"), "spec": {"checkpoint": {"every": "10min"}}}
    finding = found(decided(plan.model_copy(update=section_of)))
    [spot] = [one for one in finding if one.code == "PT341"]
    assert spot.path == ("launch", "k8s", "node_selector", "eks.amazonaws.com/capacityType")
    assert "end 120 s after a notice" in spot.message
    assert "up to 10min of training" in spot.help
    assert not [one for one in found(decided(timed(plan, 50.0, GIB))) if one.code == "PT341"]


def test_the_loss_in_words() -> None:
    assert worst_loss("30min") == "up to 30min of training"
    assert worst_loss(500) == "up to 500 steps"
    assert worst_loss(0) == worst_loss("auto")


def test_other_systems_stop_by_themselves() -> None:
    plan = timed(launch_plan(), 1e5, GIB).model_copy(update={"spec": {"engine": "megatron"}})
    settled = decided(plan)
    assert (settled.stopping, settled.launch.shutdown_timeout_s) == (None, 60)
    assert [one.code for one in found(settled) if one.code == "PT340"] == []
    assert stop_text(settled) == ""
