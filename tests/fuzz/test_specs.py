"""Attack: mutated specs are planned as by ``partool plan``. Findings are right; other exceptions are defects."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import pytest
import typer
from _attack import Attack
from _limits import bounded
from _mutations import mutated, text_of
from typer.testing import CliRunner

from partool.cli.plan import command
from partool.plan.types import Plan

CPU_S = 60.0
"""Limit of one case's processor time; the largest of partool's own specs takes a quarter of it."""
MEMORY_GIB = 2.0


def sound(plan: Plan) -> None:
    """Check the properties that every plan must have."""
    assert Plan.from_json(plan.to_json()) == plan, "the plan is another one after it was written and read"
    memory, time = plan.prediction.memory, plan.prediction.time
    assert all(value >= 0 for value in memory.terms_bytes.values()), memory.terms_bytes
    assert memory.total_bytes > 0
    assert all(value >= 0.0 and isfinite(value) for value in time.terms_s.values()), time.terms_s
    assert 0.0 < time.step_time_s < float("inf")
    assert plan.layout.mesh.world_size == plan.devices.nodes * plan.devices.per_node


@pytest.mark.timeout(1200)
def test_mutated_specs_are_planned_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    spec, out = tmp_path / "spec.yaml", tmp_path / "plan.json"
    attack, planned = Attack("specs", least=8), 0
    for number, rng in attack.cases():
        name, document = mutated(rng)
        text = text_of(document)
        out.unlink(missing_ok=True)
        with attack.case(number, lambda name=name, text=text: f"from {name}:\n{text}"):
            spec.write_text(text, encoding="utf-8", errors="surrogatepass")
            with bounded(CPU_S, MEMORY_GIB):
                result = CliRunner().invoke(app, [str(spec), "--out", str(out)], catch_exceptions=False)
            assert result.exit_code in (0, 1), f"exit code {result.exit_code}: {result.output[-500:]}"
            assert out.exists() == (result.exit_code == 0), "no plan and no error, or both"
            if out.exists():
                planned += 1
                sound(Plan.from_json(out.read_text(encoding="utf-8")))
            else:
                assert "PT" in result.stderr, f"errors without a code: {result.output[-500:]}"
    print(f"{planned} of {attack.tried} were planned")
    attack.judge()
