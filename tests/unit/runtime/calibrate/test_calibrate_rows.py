"""Rows of finished runs: the shared schema, concurrent writers, and the attempts that count."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from _telemetry import small_plan

from partool.plan.event_log import event_log, read_events
from partool.plan.run_rows import ALL_COLUMNS, COLUMNS, append_row, read_rows
from partool_runtime.telemetry import Recorder

SHARED = (
    "source,url_or_repo_path,year,model,params_b,n_layers,hidden,ffn_hidden,n_heads,n_kv_heads,vocab,seq_len,gpu,n_gpus,"
    "gpus_per_node,intra_bw_note,inter_bw_note,dtype,dp,tp,pp,cp,ep,vpp_or_schedule,zero_or_fsdp,sequence_parallel,"
    "recompute,micro_batch,global_batch,step_time_s,tflops_per_gpu,mfu_pct,tokens_per_s_per_gpu,peak_mem_gib,notes"
)
"""Header of the table of published runs."""


def run(run_dir: Path, steps: int, **plan: Any) -> list[dict[str, Any]]:
    """Record a run of ``steps`` steps of 0.1 s each, 0.06 s of it forward; return its warnings."""
    now = 0.0

    def clock() -> float:
        return now

    run_dir.mkdir(parents=True, exist_ok=True)
    planned = small_plan(steps=steps, **plan)
    with Recorder(planned, run_dir, rank=0, world_size=1, device=torch.device("cpu"), now=clock) as recorder:
        recorder.event("start", attempt=1)
        for step in range(1, steps + 1):
            with recorder.timer("forward"):
                now += 0.06
            now += 0.04
            recorder.step(step, loss=1.0)
    return [event["data"] for event in read_events(event_log(run_dir, 0)) if event["kind"] == "warning"]


def test_a_finished_run_appends_one_row_of_the_shared_schema(tmp_path: Path) -> None:
    assert run(tmp_path / "runs" / "small-1", 14) == []
    file = tmp_path / "measured_runs.csv"
    header = file.read_text().splitlines()[0].split(",")
    assert ",".join(header[: len(COLUMNS)]) == SHARED
    assert len(header) == len(set(header))
    (row,) = read_rows(file)
    assert (row["source"], row["url_or_repo_path"], row["model"]) == ("partool run", "small-1", "small")
    assert (row["hidden"], row["n_kv_heads"], row["global_batch"], row["zero_or_fsdp"]) == ("8", "1", "10", "ZeRO-0")
    assert (row["gpu"], row["dtype"], row["dp"], row["recompute"], row["steps"]) == ("cpu", "fp32", "1", "none", "12")
    assert float(row["step_time_s"]) == pytest.approx(0.1)
    assert float(row["tokens_per_s_per_gpu"]) == pytest.approx(1000)
    assert float(row["predicted_step_time_s"]) == 0.08
    assert float(row["measured_time_forward_s"]) == pytest.approx(0.06)
    assert float(row["predicted_time_forward_s"]) == 0.01
    assert float(row["predicted_memory_activations_bytes"]) == 1 << 20
    assert float(row["measured_memory_bytes"]) > 1 << 20
    assert row["measured_time_data_s"] == ""
    run(tmp_path / "runs" / "small-2", 14)
    assert [row["url_or_repo_path"] for row in read_rows(file)] == ["small-1", "small-2"]


@pytest.mark.parametrize(("folder", "steps"), [("runs/short", 11), ("elsewhere/long", 14)])
def test_short_attempts_and_runs_outside_of_a_store_leave_no_row(tmp_path: Path, folder: str, steps: int) -> None:
    assert run(tmp_path / folder, steps) == []
    assert not list(tmp_path.rglob("measured_runs.csv"))


def test_a_failed_run_leaves_no_row(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "failed"
    run_dir.mkdir(parents=True)
    recorder = Recorder(small_plan(steps=20), run_dir, rank=0, world_size=1, device=torch.device("cpu"))
    for step in range(1, 16):
        recorder.step(step)
    recorder.close(1, "ValueError: no")
    assert not list(tmp_path.rglob("measured_runs.csv"))


def test_a_row_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "measured_runs.csv").mkdir()
    (warning,) = run(tmp_path / "runs" / "small", 14)
    assert "measured_runs.csv cannot be written" in warning["message"]


def test_four_processes_append_four_intact_rows_under_one_header(tmp_path: Path) -> None:
    file, go = tmp_path / "rows.csv", tmp_path / "go"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom partool.plan.run_rows import ALL_COLUMNS, append_row\n"
        "file, go, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]\n"
        "while not go.exists():\n    time.sleep(0.001)\n"
        "append_row(file, dict.fromkeys(ALL_COLUMNS, name * 3000))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(file), str(go), name]) for name in "abcd"]
    time.sleep(0.3)
    go.touch()
    assert [writer.wait(timeout=30) for writer in writers] == [0] * 4
    with file.open(newline="") as source:
        header, *rows = csv.reader(source)
    assert tuple(header) == ALL_COLUMNS
    assert sorted(row[0][0] for row in rows) == list("abcd")
    assert all(row == [row[0][0] * 3000] * len(ALL_COLUMNS) for row in rows)


def test_an_older_file_gets_the_columns_it_lacks_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("source,mine,notes\nold,kept,some\ntorn,li")
    append_row(file, {"source": "new", "attempt": "2"})
    old, new = read_rows(file)
    assert (old["source"], old["mine"], old["notes"], old["attempt"]) == ("old", "kept", "some", "")
    assert (new["source"], new["mine"], new["attempt"]) == ("new", "", "2")
    with file.open("a") as output:
        output.write("torn,again")
    append_row(file, {"source": "newer"})
    assert [row["source"] for row in read_rows(file)] == ["old", "new", "newer"]
