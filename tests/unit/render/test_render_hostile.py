"""Injection attempts against shells, Slurm and container builders, in every string field.

Either the spec is refused, or the rendered script runs and no part of the text is executed.
"""

from __future__ import annotations

import itertools
import typing
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import pytest
from _hostile import CANARY, HARM, Path_, fields, filled
from _launch_case import launch_job, launch_plan
from _slurm_stage import Stage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan, Variable
from partool.planner.rules.launching import check_launch
from partool.render.dockerfile import dockerfile
from partool.render.render import findings, render
from partool.render.shell import UnsafeValueError, quote
from partool.render.slurm.lint import lint
from partool.spec.launch import LaunchSpec
from partool.spec.spec import Spec

FIELDS = dict(fields(LaunchSpec))
CONTAINERS = ("none", "pyxis", "apptainer")


def merged(data: dict[str, Any], container: str) -> dict[str, Any]:
    """Return the launch section of a Slurm run with the tested field."""
    base: dict[str, Any] = {"target": "slurm", "slurm": {"container": container}}
    if container != "none":
        base["image"] = "team/train:1"
    return base | data | {"slurm": base["slurm"] | data.get("slurm", {})}


def accepted(data: dict[str, Any]) -> LaunchSpec | None:
    """Return the section, or None if it is refused."""
    try:
        launch = LaunchSpec.model_validate(data)
    except ValidationError:
        return None
    devices = launch_plan(2, 2, "cpu", "cpu").devices
    found: list[Diagnostic] = check_launch(launch, devices)
    return None if any(finding.severity == "error" for finding in found) else launch


def played(folder: Path, plan: Plan) -> None:
    """Render a plan for Slurm and for hand-started nodes, run both, and check that only the agent ran."""
    stage = Stage(folder)
    own_python = plan.launch.python is None
    for target, script, arguments in (("slurm", "job.sbatch", ()), ("torchrun", "commands.sh", ("1", "head"))):
        contained = target == "slurm" and plan.launch.slurm.container != "none"
        # The fake container runtime starts the agent itself.
        python = "python" if contained else stage.python
        launch = plan.launch.model_copy(update={"python": python}) if own_python else plan.launch
        job = launch_job(plan.model_copy(update={"launch": launch}), run_dir=stage.run_dir)
        if target == "slurm" and findings("slurm", job):
            continue
        rendered = render(target, job)
        stage.put(rendered)
        (folder / "agent-environment").unlink(missing_ok=True)
        stage.play(script, *arguments)
        assert not list(folder.rglob(CANARY)), rendered.text
        if (folder / "agent-environment").exists():
            environment = stage.environment()
            assert {name: environment.get(name) for name in launch.env} == launch.env
        if target == "slurm":
            assert [finding for finding in lint(rendered.text) if finding.severity == "error"] == []
            assert "\r" not in rendered.text
        if own_python and not launch.slurm.setup:
            assert (folder / "agent-environment").exists()


def test_the_fields_are_found_and_take_harmless_text() -> None:
    assert len(FIELDS) >= 46
    assert {("python",), ("slurm", "options", "KEY"), ("env", "VALUE"), ("mounts", 0, "target")} <= set(FIELDS)
    fine = ("x", "/x", "1", "https://x.example/y", "cluster/rack", "pvc:x", "10:00", "2Gi")
    for place, data in FIELDS.items():
        assert any(_valid(filled(data, text)) for text in fine), place


def _valid(data: dict[str, Any]) -> bool:
    try:
        LaunchSpec.model_validate(data)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("section", sorted({place[0] for place in FIELDS}, key=str))
def test_harm_in_every_field(section: str, tmp_path: Path) -> None:
    seen = 0
    for (place, data), text in itertools.product(FIELDS.items(), HARM):
        if place[0] != section:
            continue
        reaches_containers = place[0] in ("image", "mounts", "secrets") or place == ("slurm", "setup")
        for container in CONTAINERS if reaches_containers else ("none",):
            launch = accepted(merged(filled(data, text), container))
            if launch is None:
                continue
            seen += 1
            if place[:2] == ("slurm", "profile") or section == "k8s":
                continue  # not rendered for Slurm: only acceptance can be checked
            plan = launch_plan(2, 2, "cpu", "cpu").model_copy(update={"launch": launch})
            played(tmp_path / f"{seen}", plan)
    assert seen or section in ("min_nodes",)


def test_what_is_executed_is_seen(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    plan = launch_plan(2, 2, "cpu", "cpu", python=stage.python, env={"A": HARM[0]})
    rendered = render("slurm", launch_job(plan, run_dir=stage.run_dir))
    stage.put(rendered)
    (stage.run / "job.sbatch").write_text(rendered.text.replace(quote(HARM[0]), HARM[0]))
    stage.play()
    assert (tmp_path / CANARY).exists()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.sampled_from([place for place in FIELDS if place[0] not in ("k8s",)]),
    text=st.one_of(
        st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40),
        st.lists(
            st.sampled_from(["$(", ")", "'", '"', "`", ";", "\n", "\r", "\\", "touch canary", "{{", "#", "x"])
        ).map("".join),
    ),
    container=st.sampled_from(CONTAINERS),
)
def test_any_text_in_any_field(
    tmp_path_factory: pytest.TempPathFactory, place: Path_, text: str, container: str
) -> None:
    launch = accepted(merged(filled(FIELDS[place], text), container))
    if launch is not None:
        plan = launch_plan(2, 2, "cpu", "cpu").model_copy(update={"launch": launch})
        played(tmp_path_factory.mktemp("stage"), plan)


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(st.sampled_from(["A", "nodes", "hash", "job", "LC_ALL"]), st.text(
    st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30), max_size=3))  # fmt: skip
def test_environment_arrives_unchanged(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> None:
    played(tmp_path_factory.mktemp("stage"), launch_plan(2, 2, "cpu", "cpu", env=env))


@pytest.mark.parametrize("text", HARM)
def test_harm_in_names_folders_and_origins(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        Spec.model_validate({"model": "llama3-8b", "data": "x", "name": text or " "})
    plan = launch_plan(2, 2, "cpu", "cpu", environment=(Variable(name="A", value=text, origin=text),))
    stage = Stage(tmp_path / "stage")
    plan = plan.model_copy(update={"launch": plan.launch.model_copy(update={"python": stage.python})})
    # A plan changed after it was read, or a strange PARTOOL_HOME: values that no pattern has checked
    unread = Variable.model_construct(name=text, value="1", origin="")
    named = plan.model_copy(update={"environment": (unread,)})
    for target in ("slurm", "torchrun", "k8s"):
        for job in (launch_job(plan, run_id=text), launch_job(named)):
            assert "PT549" in [finding.code for finding in findings(target, job)]
            with pytest.raises(UnsafeValueError):
                render(target, job)
    job = launch_job(plan, run_dir=PurePosixPath(stage.run / text))
    if findings("slurm", job):
        with pytest.raises(UnsafeValueError):
            render("slurm", job)
    else:
        stage.put(render("slurm", job))
        stage.play()
    stage.put(render("torchrun", launch_job(plan, run_dir=PurePosixPath(f"/{text}"))))
    assert stage.play("commands.sh", "0", "head")[0] == 0
    assert stage.environment()["A"] == text
    assert not list(tmp_path.rglob(CANARY))


@pytest.mark.parametrize("text", [*HARM, "a b", "a\tb", "../x", "x/../../y", "x[train]"])
def test_harm_in_dockerfiles(text: str) -> None:
    def instructions(content: str) -> list[str]:
        return [line.split()[0] for line in content.replace("\\\n", "").splitlines() if line and line[0] not in "# "]

    for values in ({"base_image": text}, {"partool_source": text}):
        try:
            got = dockerfile("cuda", "amd64", **values)
        except UnsafeValueError:
            continue
        assert instructions(got) == instructions(dockerfile("cuda", "amd64"))
        assert CANARY not in got
    for backend, architecture in (("cuda", "amd64"), ("cuda", "arm64"), ("rocm", "amd64")):
        got = dockerfile(backend, typing.cast(Literal["amd64", "arm64"], architecture))
        assert f"FROM --platform=linux/{architecture} " in got
        assert "\nUSER 1000:0\n" in got
        assert "torch>=" not in got
    with pytest.raises(ValueError, match="no known base image"):
        dockerfile("rocm", "arm64")


def test_nul_cannot_be_quoted() -> None:
    with pytest.raises(UnsafeValueError):
        quote("a\0b")
