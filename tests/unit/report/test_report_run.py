"""``partool report``: executed steps found in the logs, put on one clock, compared with their simulation."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from _executed import executed, scaled, write_event, write_run
from layouts import laid
from planned import plan_of

from partool.cli.main import run
from partool.plan.event_log import event_log
from partool.plan.pipeline_log import Executed, ExecutedStep, pipeline_data
from partool.plan.run import RunStatus, this_process, write_status
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.report.executed import aligned, compare, measured_times
from partool.report.logged import NothingExecutedError, logged_steps
from partool.report.timeline import predicted_times
from partool.report.units import seconds
from partool.schedule import Action, StageTimes, generate, simulate

SPEC = """\
model: llama3-8b
hardware: {accelerator: h200, nodes: 2, per_node: 8}
data: {source: /no/such/tokens/*.bin}
training: {sequence_length: 8192, global_batch: 16, steps: 10000}
parallel: {micro_batch: 1, sequence: 1, tensor: 1, data: {zero: 1}, pipeline: PIPELINE}
"""
PIPELINES = {
    "1f1b": "{stages: 4, schedule: 1f1b}",
    "hanayo": "{stages: 4, schedule: hanayo, waves: 1}",
    "zb-v": "{stages: 4, schedule: zb-v}",
    "weipipe": "{stages: 4, schedule: weipipe}",
}


def of(name: str) -> Plan:
    spec = SPEC.replace("PIPELINE", PIPELINES[name])
    return plan_of(spec.replace("zero: 1", "zero: 0") if name == "weipipe" else spec)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return of("1f1b")


def slower(times: StageTimes, factor: float) -> StageTimes:
    """Return times with one slow stage."""
    forward = [factor * value if stage == 2 else value for stage, value in enumerate(times.forward_s)]
    return dataclasses.replace(times, forward_s=forward)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_run_that_goes_as_simulated_is_seen_to(name: str, tmp_path: Path) -> None:
    plan = of(name)
    times = predicted_times(plan)
    write_run(tmp_path, plan, lambda step: scaled(times, 1.0 + step / 10))
    found = compare(tmp_path, plan)
    assert (found.step, found.steps) == (4, (3, 4, 5))
    assert found.executed.span_s == pytest.approx(1.4 * found.predicted.span_s, rel=1e-3)
    assert found.executed.span_s == pytest.approx(found.simulated.span_s, rel=1e-3)
    assert found.executed.bubble == pytest.approx(found.simulated.bubble, abs=1e-3)
    assert found.measured.forward_s == pytest.approx([1.4 * value for value in times.forward_s], rel=1e-3)
    assert found.measured.backward_s == pytest.approx([1.4 * value for value in times.backward_s], rel=1e-3)
    assert isinstance(found.measured.send_s, dict)
    if name != "weipipe":  # messages that carry weights wait for each other
        assert list(found.measured.send_s.values()) == pytest.approx(
            [1.4 * times.send_s] * len(found.measured.send_s), abs=2e-6
        )
    boxes = sorted((box.rank, box.action) for box in found.executed.boxes)
    assert boxes == sorted((box.rank, box.action) for box in found.simulated.boxes)
    for rank in found.ranks:
        assert rank.compute_s + rank.waiting_s + rank.other_s == pytest.approx(found.executed.span_s, rel=1e-3)
        assert rank.other_s < 1e-3 * found.executed.span_s


def test_what_lies_between_actions_is_neither_compute_nor_waiting(plan: Plan, tmp_path: Path) -> None:
    times = predicted_times(plan)
    write_run(tmp_path, plan, lambda _: times, gap_s=0.002)
    found = compare(tmp_path, plan)
    m = plan.layout.derived.accumulation
    assert found.executed.span_s > found.simulated.span_s + 2 * m * 0.0019
    assert [rank.compute_s for rank in found.ranks] == pytest.approx(
        [m * (f + b) for f, b in zip(times.forward_s, times.backward_s, strict=True)], rel=1e-3
    )


def test_a_slow_stage_shows_in_the_simulation_from_measured_times(plan: Plan, tmp_path: Path) -> None:
    times = predicted_times(plan)
    write_run(tmp_path, plan, lambda _: slower(times, 3.0))
    found = compare(tmp_path, plan)
    assert found.measured.forward_s[2] == pytest.approx(3 * times.forward_s[2], rel=1e-3)
    assert found.simulated.span_s == pytest.approx(found.executed.span_s, rel=1e-3)
    assert found.predicted.span_s < 0.8 * found.executed.span_s


def test_clocks_that_disagree_are_set_right_where_messages_prove_it(plan: Plan, tmp_path: Path) -> None:
    times = predicted_times(plan)
    for folder, ahead in (("right", {}), ("wrong", {1: 0.7, 2: -3.0})):
        write_run(tmp_path / folder, plan, lambda _: times, ahead_s=ahead)
    right, wrong = (compare(tmp_path / folder, plan) for folder in ("right", "wrong"))
    assert wrong.executed.span_s == pytest.approx(right.executed.span_s, rel=0.02)
    for one, other in zip(wrong.executed.boxes, right.executed.boxes, strict=True):
        assert other.action == one.action
        assert one.start_s == pytest.approx(other.start_s, abs=0.02 * right.executed.span_s)


def test_clocks_that_agree_are_left_alone(plan: Plan, tmp_path: Path) -> None:
    times = predicted_times(plan)
    write_run(tmp_path, plan, lambda _: times, steps=range(3, 4))
    ranks = logged_steps(tmp_path, plan)[3].ranks
    moved = aligned(compare(tmp_path, plan).schedule, ranks)
    zero = min(step.unix_s for step in ranks.values())
    for rank, step in ranks.items():
        late = [a.start_s - b.start_s for a, b in zip(moved[rank].actions, step.actions, strict=True)]
        assert late == pytest.approx([step.unix_s - zero] * len(late), abs=1e-9)


def test_pipelines_of_replicas_are_told_apart(tmp_path: Path) -> None:
    plan = of("1f1b")
    count = plan.layout.mesh.world_size // plan.layout.mesh.pp
    assert count > 1
    times = predicted_times(plan)
    write_run(tmp_path, plan, lambda _: times, pipelines=count)
    for step in (3, 4, 5):
        for rank, done in executed(plan, scaled(times, 2.0)).items():  # repeated after a restart, slower
            write_event(tmp_path, rank * count + 1, pipeline_data(step, True, 1.8e9, done))
    first, second = compare(tmp_path, plan, 0), compare(tmp_path, plan, 1)
    assert second.executed.span_s == pytest.approx(2 * first.executed.span_s, rel=1e-3)
    with pytest.raises(NothingExecutedError, match=f"no pipeline {count}: the run has {count}"):
        compare(tmp_path, plan, count)


def test_frozen_stages_are_simulated_without_backward_passes(plan: Plan, tmp_path: Path) -> None:
    times = predicted_times(plan)
    for rank, done in executed(plan, times).items():
        kept = [one for one in done if rank > 1 or one.action.kind in ("F", "SEND_F", "RECV_F")]
        kept = [one for one in kept if one.action != ("SEND_B", 2, one.action.micro_batch)]
        write_event(tmp_path, rank * 4, pipeline_data(3, True, 1.8e9, kept))
    found = compare(tmp_path, plan)
    assert found.schedule.trained_from == 2
    kinds = {(box.rank, box.action.kind) for box in found.simulated.boxes}
    assert kinds == {(0, "F"), (1, "F"), (2, "F"), (2, "B"), (3, "F"), (3, "B")}


def test_steps_that_not_all_ranks_have_told_of_are_not_there(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(NothingExecutedError, match="there is none in the logs yet"):
        compare(tmp_path, plan)
    times = predicted_times(plan)
    write_run(tmp_path, plan, lambda _: times)
    log = event_log(tmp_path, 4)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]) + lines[3][:100])
    assert sorted(logged_steps(tmp_path, plan)) == [1, 2, 3]
    with pytest.raises(NothingExecutedError, match="step 4 was not logged; logged: 1, 2, 3"):
        compare(tmp_path, plan, step=4)
    log.unlink()
    with pytest.raises(NothingExecutedError, match="some of its ranks have logged none"):
        compare(tmp_path, plan)


class Home:
    """A folder of runs, and the command in it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys

    def made(self, plan: Plan) -> Path:
        folder = self.root / "runs" / "example-20260101-000000-aaaa"
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(plan.to_json())
        return folder

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            run(["report", *map(str, arguments)])
        shown = self.capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err


@pytest.fixture
def home(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    return Home(tmp_path / "home", capsys)


SUMMARY: dict[str, Any] = {
    "world_size": 16,
    "ranks": 16,
    "terms": [
        {"section": "memory", "term": "optimizer", "predicted": 2**30, "measured": 2**31, "measure": "counted tensors",
         "unit": "bytes", "ratio": 2.0},
        {"section": "time", "term": "pipeline_bubble", "predicted": 0.5, "measured": 0.25,
         "measure": "waits for other stages", "unit": "s", "ratio": 0.5},
        {"section": "time", "term": "offload", "predicted": None, "measured": None, "measure": "not measured",
         "unit": "s", "ratio": None},
    ],
}  # fmt: skip


def test_the_command_shows_terms_timelines_and_writes_files(plan: Plan, home: Home, tmp_path: Path) -> None:
    folder = home.made(plan)
    times = predicted_times(plan)
    write_run(folder, plan, lambda _: times, gap_s=0.001)
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    html, trace = tmp_path / "r.html", tmp_path / "t.json"
    code, out, err = home("last", "--html", html, "--timeline", trace)
    assert (code, err) == (0, "")
    assert re.search(r"pipeline_bubble +500 ms +250 ms +0\.50 +waits for other stages", out)
    assert "offload" not in out
    assert "1f1b, 4 ranks, 4 micro-batches: step 4, of usual length among 3 logged steps" in out
    ratios = [float(re.search(rf"^{name}.* (\d\.\d\d)$", out, re.MULTILINE)[1]) for name in ("predicted", "simulated")]  # type: ignore[index]
    assert all(1.0 < ratio < 1.5 for ratio in ratios)
    rows = [line for line in out.splitlines() if re.match(r"rank \d ", line)]
    assert len(rows) == 2 * 4  # executed, simulated
    assert [re.findall(r"[FB]\d", row) for row in rows[:4]] == [re.findall(r"[FB]\d", row) for row in rows[4:]]
    page = html.read_text()
    assert page.count('<svg id="timeline-') == 3
    assert "250 ms" in page
    assert "http" not in page.replace("http-equiv", "")
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(": ")[1].split(" (")[0] for name in names] == [
        "executed", "simulated from measured times", "predicted",
    ]  # fmt: skip
    assert sum(event["ph"] == "X" for event in events) == 3 * 4 * 4 * 2


def test_the_command_as_data(plan: Plan, home: Home) -> None:
    folder = home.made(plan)
    times = predicted_times(plan)
    write_run(folder, plan, lambda _: times)
    code, out, _ = home("example", "--output", "json", "--step", 5)
    data = json.loads(out)
    assert code == 0
    assert (data["summary"], data["pipeline"]["step"]) == (None, 5)
    assert data["pipeline"]["executed"]["span_s"] == pytest.approx(data["pipeline"]["predicted"]["span_s"], rel=1e-3)
    assert [row["rank"] for row in data["pipeline"]["stages"]] == [0, 1, 2, 3]


def test_a_run_without_a_timeline_shows_its_terms(plan: Plan, home: Home, tmp_path: Path) -> None:
    folder = home.made(plan)
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    page = tmp_path / "r.html"
    code, out, _ = home("--html", page)
    assert code == 0
    assert "No timeline: no step's timeline is known: there is none in the logs yet." in out
    assert "No timeline" in page.read_text()
    code, _, err = home("--step", 3)
    assert code == 1
    assert "error[PT515]" in err
    (folder / "summary.json").write_text("{")
    code, _, err = home()
    assert (code, "summary.json: it is no JSON" in err, "error[PT586]" in err) == (1, True, True)
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"terms": [SUMMARY["terms"][0] | {"ratio": "x"}]}))
    assert "summary.json: `terms[0].ratio`: input should be a valid number" in home()[2]
    (folder / "summary.json").unlink()
    assert "No terms: the run has not ended yet" in home()[1]
    mesh = plan.layout.mesh._replace(pp=1, dp_shard=plan.layout.mesh.dp_shard * plan.layout.mesh.pp)
    whole = {"mesh": mesh, "stages": ((0, plan.model.layers),)}
    batch = plan.training.global_batch * plan.layout.mesh.pp
    training = plan.training.model_copy(update={"global_batch": batch})
    flat = plan.model_copy(update={"layout": laid(plan.layout, **whole), "training": training})
    (folder / "plan.json").write_text(flat.to_json())
    assert "No timeline: the run has no pipeline." in home()[1]
    assert home("nothing")[0] == 1


def test_measured_times_are_means_of_stages_and_of_the_quicker_messages() -> None:
    schedule = generate("1f1b", 2, 4)
    ranks: dict[int, list[Executed]] = {0: [], 1: []}
    for batch in range(4):
        for stage in (0, 1):
            start_s, took_s = 10.0 * batch, (1.0 + stage) * (1 + batch)
            ranks[stage].append(Executed(Action("F", stage, batch), start_s, start_s + took_s, 0.0))
            ranks[stage].append(Executed(Action("B", stage, batch), start_s + 100, start_s + 100 + 2 * took_s, 0.0))
        for kind, to, back in (("SEND_F", 1, "RECV_F"), ("SEND_B", 0, "RECV_B")):
            ranks[1 - to].append(Executed(Action(kind, 1 - to, batch), 10.0 * batch, 10.0 * batch, 0.0))  # type: ignore[arg-type]
            ranks[to].append(Executed(Action(back, to, batch), 0.0, 10.5 * batch + 0.25 + to, 0.0))  # type: ignore[arg-type]
    steps = {rank: ExecutedStep(3, True, 5.0, tuple(done)) for rank, done in ranks.items()}
    times = measured_times(schedule, steps)
    assert times.forward_s == [2.5, 5.0]
    assert times.backward_s == [5.0, 10.0]
    assert times.send_s == {(0, 1): 1.25, (1, 0): 0.25}  # later marks were noticed late


def started(folder: Path, plan: Plan, attempt: int) -> None:
    """Write the start of an attempt into all logs."""
    for rank in range(plan.layout.mesh.world_size):
        path = event_log(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"attempt": attempt, "world_size": plan.layout.mesh.world_size, "plan_hash": plan.hash}
        with path.open("a") as file:
            file.write(json.dumps({"v": 1, "kind": "start", "t": 0.0, "rank": rank, "data": data}) + "\n")


@pytest.mark.parametrize("before", ["hanayo", "weipipe", "2 ranks"])
def test_a_step_of_an_earlier_plan_is_set_beside_that_plan(before: str, plan: Plan, home: Home) -> None:
    """Resumed with another schedule: each step is compared with the plan of its attempt, or with none if it is gone."""
    folder = home.made(plan)
    old = plan_of(SPEC.replace("PIPELINE", "{stages: 2, schedule: 1f1b}")) if before == "2 ranks" else of(before)
    took, now = scaled(predicted_times(old), 1.5), predicted_times(plan)
    started(folder, old, 1)
    write_run(folder, old, lambda _: took, steps=range(1, 7), pipelines=16 // old.layout.mesh.pp)
    started(folder, plan, 2)
    write_run(folder, plan, lambda _: now, steps=range(5, 10), pipelines=4)
    kept = folder / "plan-1.json"
    kept.write_text(old.to_json())

    code, out, _ = home("--step", 3)
    assert code == 0
    ranks = old.layout.mesh.pp
    schedule, batches = old.layout.pipeline.schedule, old.layout.derived.accumulation
    title = f"{schedule}, {ranks} ranks, {batches} micro-batches: step 3, done in attempt 1"
    assert f"{title} under an earlier plan\n" in out
    assert "of usual length" not in out
    assert re.search(r"^predicted .* 1\.50$", out, re.MULTILINE)
    assert len(re.findall(r"^rank \d ", out, re.MULTILINE)) == 2 * ranks
    code, out, _ = home("--step", 5)  # repeated after a restart
    assert f"1f1b, 4 ranks, {plan.layout.derived.accumulation} micro-batches: step 5\n" in out
    assert "step 8, of usual length among 5 logged steps" in home()[1] or "step 7, of usual length" in home()[1]

    kept.unlink()
    code, out, _ = home("--step", 3)
    assert code == 0
    assert "The plan of attempt 1 is not kept any more" in out
    assert "predicted" not in out
    assert "simulated " not in out.replace("is simulated", "")
    assert len(re.findall(r"^rank \d ", out, re.MULTILINE)) == ranks
    page, trace = folder / "r.html", folder / "t.json"
    data = json.loads(home("--step", 3, "--output", "json", "--html", page, "--timeline", trace)[1])["pipeline"]
    assert (data["plan_hash"], data["attempt"], data["predicted"], data["simulated"]) == (None, 1, None, None)
    assert data["executed"]["span_s"] == pytest.approx(simulate(schedule_of(old.layout), took).makespan_s, rel=1e-3)
    assert page.read_text().count('<svg id="timeline-') == 1
    assert sum(event["name"] == "process_name" for event in json.loads(trace.read_text())["traceEvents"]) == 1


def test_steps_of_an_earlier_plan_alone_are_offered(plan: Plan, home: Home) -> None:
    folder, old = home.made(plan), of("hanayo")
    (folder / "plan-1.json").write_text(old.to_json())
    started(folder, old, 1)
    times = predicted_times(old)
    write_run(folder, old, lambda _: times, steps=range(1, 3))
    started(folder, plan, 2)
    code, out, _ = home()
    assert code == 0
    assert "there is none in the logs yet; --step shows those of an earlier plan: 1, 2." in " ".join(out.split())


def test_halved_backward_passes_have_both_halves_in_the_table(home: Home) -> None:
    plan = of("zb-v")
    folder, times = home.made(plan), predicted_times(plan)
    write_run(folder, plan, lambda _: times)
    _, out, _ = home()
    assert re.search(r"^stage +rank +forward .* input gradients .* weight gradients ", out, re.MULTILINE)
    assert " backward " not in out.split("stage  rank")[1]
    (row,) = re.findall(r"^1 +1 +(\S+ \S+) .*", out.split("stage  rank")[1], re.MULTILINE)
    assert row == seconds(times.forward_s[1])
    page = folder / "r.html"
    home("--html", page)
    assert "Input gradients" in page.read_text()


def test_a_run_that_goes_on_is_said_to(plan: Plan, home: Home) -> None:
    folder = home.made(plan)
    now: dict[str, Any] = {"state": "running", "created": 1.0, "attempt": 2, **this_process()}
    write_status(folder, RunStatus(**now))
    code, out, _ = home("--html", folder / "r.html")
    assert code == 0
    assert out.startswith("example-20260101-000000-aaaa\n  Model ")
    assert re.search(r"^  State +running, attempt 2\n\nNo terms: the run is still running\.$", out, re.MULTILINE)
    assert "running, attempt 2" in (folder / "r.html").read_text()
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    assert "Terms are those of an earlier attempt" in home()[1]
    write_status(folder, RunStatus(state="done", created=1.0, attempt=2, exit_code=0))
    assert re.search(r"^  State +done\n\n", home()[1], re.MULTILINE)
    write_status(folder, RunStatus(state="failed", created=1.0, attempt=2, reason="rank 0: killed by SIGKILL"))
    assert re.search(r"^  State +failed \(rank 0: killed by SIGKILL\)$", home()[1], re.MULTILINE)
