"""A run with its optimizer on disks that is killed: the next one says so and ends with the bits of an unbroken one."""

from __future__ import annotations

from pathlib import Path

import pytest
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _trainer_worker import train_and_die
from test_offload import assert_same_state, offloaded, plain

from partool_kernels import isa


@pytest.mark.timeout(170)
@pytest.mark.skipif(isa() is None, reason="there is no compiled library, whose bits both sides share")
def test_a_killed_run_goes_on_from_its_last_checkpoint(pools: Pools, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    disk = tmp_path / "disk"
    disk.mkdir()
    bare = plain(tmp_path / "text", ranks=1, zero=0, accumulation=1)
    plan = offloaded(bare, folder=str(disk), buffers=3)
    endless = plan.training.model_copy(update={"steps": 5000})
    run_dir = tmp_path / "broken"
    pools.run(1, train_and_die, plan.model_copy(update={"training": endless}).to_json(), run_dir, lost=[0])
    step = max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*[0-9]"))
    left = [path.suffix for path in disk.iterdir()]
    then = Jobs(tmp_path, pools)
    for name, made, run in (("resumed", plan, "broken"), ("unbroken", bare, "unbroken")):
        training = made.training.model_copy(update={"steps": step + 3})
        then.train(name, made.model_copy(update={"training": training}), run=run, resume=run == "broken")

    assert left == [".claim"], "the state's space is free, and its claim tells of it"
    assert [then.ended(name) for name in ("resumed", "unbroken")] == ["done", "done"]
    assert then.events("broken", "start")[-1]["resumed_from"] == step
    warnings = [event["message"] for event in then.events("broken", "warning")]
    assert [("was killed" in text, "last checkpoint" in text) for text in warnings if str(disk) in text] == [
        (True, True)
    ]
    assert_same_state(then.state("broken", step + 3), then.state("unbroken", step + 3))
    assert list(disk.iterdir()) == []
