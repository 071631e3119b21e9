"""Keys of trackers that are in the environment of the launcher are in nothing that is rendered."""

from __future__ import annotations

import pytest
from _k8s_case import k8s_plan
from _launch_case import launch_job, launch_plan

from partool.plan.types import Plan
from partool.render.render import render
from partool.spec.telemetry import TelemetrySpec, TrackerSpec
from partool.strategies.trackers import TRACKERS


def plans() -> list[Plan]:
    return [launch_plan(), launch_plan(target="torchrun"), k8s_plan()]


def test_keys_of_trackers_are_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (key for record in TRACKERS.values() for key in record.keys):
        monkeypatch.setenv(variable, "feedface" * 5)
    telemetry = TelemetrySpec(trackers=[TrackerSpec(name=name) for name in TRACKERS])
    for plan in (each.model_copy(update={"telemetry": telemetry}) for each in plans()):
        texts = [*render(plan.launch.target, launch_job(plan)).files.values(), plan.to_json()]
        assert any('"wandb"' in text for text in texts)
        assert not any("feedface" in text for text in texts), plan.launch.target
