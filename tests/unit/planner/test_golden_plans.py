"""Plans of awkward specs and of all of ``specs/`` equal the recorded ones: layouts, bytes, seconds and findings."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import yaml
from _golden import RECORD, fixed_machine, record_of, result_of
from _golden_specs import names, text_of
from often import often
from planned import plan_of
from rich.console import Console

from partool.plan.as_spec import own_yaml
from partool.plan.types import Plan
from partool.planner.explain.answers import MOST_LINES, WIDTH
from partool.report import render_plan
from partool.report.plan import SCREEN_LINES

RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))
RUNNABLE = (
    "quickstart", "gpt2-xl", "mistral-7b-gh200", "from-config", "llama3-8b", "llama3-70b", "hanayo", "weipipe",
    "tensor", "qwen3-8b-mi300x", "long-context", "long-context-llama3-8b", "video-small", "video-3b",
    "quickstart-offload", "experts", "mixtral-8x7b",
)  # fmt: skip
"""Examples of ``specs/`` that the runtime can train as they are planned."""
OFTEN = (
    "cpu-open", "cpu-batch-prime", "node-short-batch", "superchip-open", "video-open", "zero-0", "zero-2",
    "hybrid-shards", "gather-ahead", "recompute-each-layer", "tiles", "tensor-two-dims", "tensor-chunks",
    "pipeline-interleaved", "pipeline-zb-v", "pipeline-hanayo", "pipeline-weipipe", "sequence-ring-zigzag",
    "sequence-startrail", "sequence-dsp", "offload-fraction", "offload-parameters", "experts-pinned", "fp8",
    "own-device", "refused-too-large", "refused-pairs", "specs/experts.yaml", "specs/llama3-8b.yaml",
    "specs/quickstart.yaml", "specs/video-small.yaml",
)  # fmt: skip
"""Specs that are planned each time: of every mechanism one."""
TWICE = (
    "cpu-batch-prime", "video-open", "hybrid-shards", "recompute-each-layer", "tiles", "tensor-two-dims",
    "pipeline-interleaved", "pipeline-weipipe", "sequence-ring-zigzag", "sequence-startrail", "offload-fraction",
    "offload-parameters", "experts-pinned", "fp8",
)  # fmt: skip
"""Specs that are planned with their own layout each time: of every part of a layout one."""


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    with fixed_machine():
        yield


def differences(place: str, was: Any, now: Any) -> Iterator[str]:
    """Yield the differences; floats may differ by a relative 1e-9."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted(was.keys() | now.keys()):
            yield from differences(f"{place}.{key}", was.get(key), now.get(key))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for number, pair in enumerate(zip(was, now, strict=True)):
            yield from differences(f"{place}[{number}]", *pair)
    elif isinstance(was, float) and isinstance(now, (int, float)):
        if not isclose(was, now, rel_tol=1e-9, abs_tol=1e-15):
            yield f"{place}: {was} -> {now}"
    elif was != now:
        yield f"{place}: {was} -> {now}"


def test_every_spec_is_recorded() -> None:
    assert RECORDED.keys() == set(names())
    assert sum("layout" not in record for record in RECORDED.values()) >= 6  # some specs are refused
    assert sum(bool(record.get("others")) for record in RECORDED.values()) >= 40


@pytest.mark.parametrize("name", often(names(), OFTEN))
def test_a_plan_stays(name: str) -> None:
    now = json.loads(json.dumps(record_of(name)))
    plan = result_of(name).plan  # the one of the record
    if plan is not None:
        check_answers(plan)
    if name.startswith("specs/"):
        check_example(Path(name).stem, plan)
    assert not list(differences(name, RECORDED[name], now))


def check_answers(plan: Plan) -> None:
    """Check that a plan answers five questions in seven lines of a terminal, and with figures."""
    assert [one.question for one in plan.answers] == ["Fits", "Why", "Next best", "Limit", "Sure"]
    lines = [line for one in plan.answers for line in textwrap.wrap(one.text, WIDTH, break_on_hyphens=False)]
    assert len(lines) <= MOST_LINES == 7, lines
    words = set(" ".join(lines).replace(",", "").split())
    assert not words & {"some", "few", "several", "many", "likely"}, lines


def check_example(name: str, plan: Plan | None) -> None:
    """Check what every example of ``specs/`` has; here, as its plan is made once."""
    assert plan is not None
    assert plan.reasons
    # Where weights travel there is one way to keep state and activations.
    assert plan.alternatives or name == "weipipe"
    assert plan.prediction.memory.terms_bytes["parameters"] > 0
    assert plan.runnable == (name in RUNNABLE)
    render_plan(plan, Console(file=(out := io.StringIO()), width=80, color_system=None), source=[f"specs/{name}.yaml"])
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(lines) <= SCREEN_LINES
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("name", often((name for name, record in RECORDED.items() if "layout" in record), TWICE))
def test_a_layout_put_into_its_spec_gives_itself(name: str) -> None:
    """Planning with the lines that "use this layout" prints gives the same layout and the same predictions."""
    text, folder = text_of(name)
    first = result_of(name).plan
    assert first is not None
    whole = yaml.safe_load(text) | yaml.safe_load(own_yaml(first))
    again = plan_of(yaml.safe_dump(whole), folder=folder, name="spec")
    assert again.layout == first.layout
    assert isclose(again.prediction.time.step_time_s, first.prediction.time.step_time_s, rel_tol=1e-9)
