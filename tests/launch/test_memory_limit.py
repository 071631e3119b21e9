"""Training with saves under exactly the memory limit of the rendered pod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from memory_group import MemoryGroup, memory_group
from patience import PATIENCE
from planned import plan_of

from partool.plan.run import agent_command, read_status
from partool.plan.types import Plan
from partool.render.k8s.resources import memory
from partool.spec.targets.k8s.rules import quantity

SPEC = """
model: {layers: 2, hidden: 768, ffn_hidden: 3001, heads: 6, vocab: 256}
training: {sequence_length: 16, global_batch: 2, steps: 2, precision: fp32}
data: TEXT
hardware: {accelerator: cpu, per_node: 2, memory_gib: 32}
parallel: {data: {zero: 3}, tensor: {degree: 1}, compile: none}
checkpoint: {every: 1, mode: MODE}
launch: {target: k8s, image: "registry/train:1", k8s: {storage: "pvc:runs", shared_memory: 1Mi}}
"""
"""A model of 18 million parameters, of which a step takes little time and a save much memory."""


@pytest.mark.long
@pytest.mark.timeout(500)
def test_saves_live_within_the_rendered_limit(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
    peaks = {}
    for mode in ("async", "sync"):
        plan = plan_of(SPEC.replace("TEXT", str(text)).replace("MODE", mode))
        limit_bytes = int(quantity(memory(plan)))
        with memory_group(limit_bytes) as group:
            peaks[mode] = trained(plan, tmp_path / mode, group)
            assert group.kills() == 0
        assert peaks[mode] < limit_bytes
        sizes = [file.stat().st_size for file in (tmp_path / mode / "checkpoints" / "step-00000002").glob("*.distcp")]
        assert len(sizes) == 2
        assert max(sizes) == pytest.approx(plan.prediction.memory.saved_bytes, rel=0.01)
    assert peaks["async"] > peaks["sync"]


def trained(plan: Plan, folder: Path, group: MemoryGroup) -> int:
    """Train the plan in a control group, and return the most bytes that its processes had."""
    folder.mkdir()
    (folder / "plan.json").write_text(plan.to_json())
    command = agent_command(sys.executable, folder / "plan.json", folder, resume=False)
    with (folder / "agent.txt").open("wb") as output:
        agent = subprocess.Popen(group.command(*command), stdout=output, stderr=output, start_new_session=True)
    peak_bytes = 0
    try:
        for _ in range(int(200 * PATIENCE / 0.01)):
            try:
                code = agent.wait(0.01)
                break
            except subprocess.TimeoutExpired:
                peak_bytes = max(peak_bytes, group.anonymous_bytes())
    finally:
        agent.kill()
        agent.wait()
    assert code == 0, (folder / "agent.txt").read_text()
    assert read_status(folder).state == "done"
    return peak_bytes
