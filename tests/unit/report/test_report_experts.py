"""The report of experts' load, from the event logs of several pipeline stages."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

from planned import plan_of
from rich.console import Console

from partool.report.curves import history_of
from partool.report.experts import expert_loads, render_expert_loads
from partool.report.headline import headline
from partool.report.html_run import render_run_html

SPEC = """
model: {layers: 2, hidden: 32, heads: 2, vocab: 256, max_position: 64, moe: {experts: 4, top_k: 2, ffn_hidden: 16}}
hardware: {accelerator: cpu, per_node: 1}
data: {source: python-stdlib}
training: {steps: 2, global_batch: 1, sequence_length: 16, precision: fp32}
"""


def layer(number: int, tokens: list[int], **fields: Any) -> dict[str, Any]:
    imbalance = max(tokens) * len(tokens) / sum(tokens)
    plain = {"layer": number, "tokens": tokens, "imbalance": imbalance, "dropped": 0.0, "entropy": 1.0, "bias": None}
    return plain | fields


def write(folder: Path, rank: int, step: int, layers: list[dict[str, Any]]) -> None:
    event = {"v": 1, "kind": "experts", "t": 0.0, "rank": rank, "data": {"step": step, "layers": layers}}
    (folder / "events").mkdir(exist_ok=True)
    with (folder / "events" / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_the_latest_load_of_every_stage_is_shown(tmp_path: Path) -> None:
    write(tmp_path, 0, 10, [layer(1, [1, 1, 1, 1])])
    write(tmp_path, 0, 20, [layer(1, [6, 2, 0, 0], dropped=0.125, bias=(-0.01, 0.02))])
    write(tmp_path, 4, 20, [layer(3, [2, 2, 2, 2])])
    loads = expert_loads(tmp_path)
    assert [(each.step, each.layer) for each in loads] == [(20, 1), (20, 3)]
    text = StringIO()
    render_expert_loads(loads, Console(file=text, width=100))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("Experts at step 20")
    assert lines[2].split() == ["1", "3.00", "×", "0.00", "×", "2", "12.5%", "1.00", "-0.01", "to", "+0.02"]
    assert lines[3].split()[:5] == ["3", "1.00", "×", "1.00", "×"]


def test_a_dense_run_has_no_table(tmp_path: Path) -> None:
    text = StringIO()
    render_expert_loads(expert_loads(tmp_path), Console(file=text))
    assert text.getvalue() == ""


def test_the_page_shows_each_expert(tmp_path: Path) -> None:
    write(tmp_path, 0, 20, [layer(1, [6, 2, 0, 0]), layer(2, [2, 2, 2, 2])])
    plan = plan_of(SPEC)
    head = headline(plan, history_of(()), None)
    page = render_run_html(plan, "run", None, None, "no pipeline", head=head, loads=expert_loads(tmp_path))
    assert page.count("<title>expert ") == 2 * 4
    assert "<title>expert 1: 1.00 ×</title>" in page
    assert "4 experts, 0.00 to 3.00 times the mean" in page
    assert 'fill-opacity="0.5"' in page
    assert "Load of experts" not in render_run_html(plan, "run", None, None, "no pipeline", head=head)
