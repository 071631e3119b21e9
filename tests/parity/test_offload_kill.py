"""A run with its optimizer on disks that is killed: the next one says so and ends with the bits of an unbroken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import _offload_kill_worker as worker
import pytest
from _plans import write_text
from test_offload import assert_same_state, offloaded, plain
from test_trainer import Jobs

from partool_kernels import isa


@pytest.mark.timeout(170)
@pytest.mark.skipif(isa() is None, reason="there is no compiled library, whose bits both sides share")
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    disk = tmp_path / "disk"
    disk.mkdir()
    bare = plain(tmp_path / "text", ranks=1, zero=0, accumulation=1)
    plan = offloaded(bare, folder=str(disk), buffers=3)
    first, then = Jobs(tmp_path), Jobs(tmp_path)
    endless = plan.training.model_copy(update={"steps": 5000})
    first.add("killed", plan.model_copy(update={"training": endless}), run="broken")
    then.add("resumed", plan, run="broken", resume=True)
    then.add("unbroken", bare, run="unbroken")
    (tmp_path / "first.json").write_text(json.dumps(first.jobs))
    (tmp_path / "then.json").write_text(json.dumps(then.jobs))
    command = [sys.executable, "-W", "ignore", worker.__file__, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr

    step, left = json.loads((tmp_path / "left.json").read_text())
    assert left == [".claim"], "the state's space is free, and its claim tells of it"
    assert [then.ended(name) for name in ("resumed", "unbroken")] == ["done", "done"]
    assert then.events("broken", "start")[-1]["resumed_from"] == step
    warnings = [event["message"] for event in then.events("broken", "warning")]
    assert [("was killed" in text, "last checkpoint" in text) for text in warnings if str(disk) in text] == [
        (True, True)
    ]
    assert_same_state(then.state("broken", step + 3), then.state("unbroken", step + 3))
    assert list(disk.iterdir()) == []
