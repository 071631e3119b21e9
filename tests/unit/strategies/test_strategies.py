"""Records of strategies: each has the modules, the test and the documentation page of its name."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from partool.cost.sequence.price import price_of
from partool.launch.target import ClusterTarget, DoctorFiles, Target
from partool.launch.targets import doctor
from partool.plan.layout import SequenceLayout
from partool.schedule import generate, problems
from partool.schedule.generators import ORDERS
from partool.spec._base import OneOf, Section
from partool.spec.launch import LaunchSpec
from partool.spec.parallel import ParallelSpec
from partool.spec.spec import Spec
from partool.spec.targets.rules import TargetRules, rules_of
from partool.spec.training import OptimizerSpec
from partool.strategies.jobs import JOBS
from partool.strategies.kernel_parts import PARTS
from partool.strategies.optimizers import OPTIMIZERS
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS, PREFERENCE
from partool.strategies.targets import JOB_SCRIPTS, SECTIONS, TARGETS
from partool_kernels.host import MOMENTS
from partool_runtime.fused.apply import PARTS as PUT
from partool_runtime.optim.steps import STEPS
from partool_runtime.parallel.sequence.compiled import share_graph
from partool_runtime.parallel.sequence.types import method_named
from partool_runtime.worker import load_job

ROOT = Path(__file__).parents[3]


def has_test(place: str, strategy: str = "") -> bool:
    """Return True if there is such a test, in a file that names the strategy where one is given."""
    path, _, name = place.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    there = any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)
    return there and (not strategy or strategy in texts)


def page(name: str) -> str:
    return (ROOT / "docs/guide" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_runs_is_tested_and_told(name: str) -> None:
    record = JOBS[name]
    assert callable(load_job(name))
    assert has_test(record.tested_by)
    for path in record.settled:
        TypeAdapter(ParallelSpec).validate_python(nested(path, record.settled[path]))
    for path in record.unread:
        section, _, field = path.partition(".")
        model = Spec.model_fields[section].annotation
        assert not field or field in getattr(model, "model_fields", {}), path
    assert name == "train" or f"`job: {name}`" in page("evaluation.md")


def nested(path: str, value: object) -> dict[str, object]:
    section, _, name = path.partition(".")
    return {section: {name: value} if name else value}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_made_tested_and_told(name: str) -> None:
    record = SCHEDULES[name]
    stages = {"1": 1, "any": 1}.get(record.stages, 2)
    assert problems(generate(name, 2, 4, stages)) == []
    assert has_test(record.parity, name)
    row = next(line for line in page("pipelines.md").splitlines() if line.startswith("|") and f"`{name}`" in line)
    told = row.split("|")
    assert ("multiple" in told[3]) == record.whole_rounds
    assert ("halved" in told[4]) == record.split
    assert {"1": "1", "2": "2", "any": "any", "2 or more": "`chunks`", "2 per wave": "2 × `waves`"}[
        record.stages
    ] == told[2].strip()
    assert record.words
    assert record.source


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_run_tested_and_told(name: str) -> None:
    record = METHODS[name]
    assert callable(share_graph if record.by_graph else method_named(name))
    price = price_of(name)
    assert all(callable(each) for each in (price.parts, price.exchange, price.buffers))
    assert has_test(record.parity, name)
    assert f"`{name}`" in page("sequence.md")
    assert record.words
    assert record.source


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_a_step_and_is_told(name: str) -> None:
    record = OPTIMIZERS[name]
    assert record.moments == MOMENTS.get(name, record.moments)
    assert record.host == (name in MOMENTS)
    assert (name in STEPS) == (not record.rest and not record.norms and not record.whole_steps)
    assert not record.rest or not OPTIMIZERS[record.rest].rest
    assert not record.whole_steps or not OPTIMIZERS[record.whole_steps].whole_steps
    assert has_test(record.test, name)
    assert f"`{name}`" in page("optimizers.md")
    assert record.source


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_its_rooms_and_is_told(name: str) -> None:
    record = TARGETS[name]
    if record.section:
        assert isinstance(LaunchSpec.model_fields[name].default, Section)
        assert isinstance(rules_of(name), TargetRules)
    if record.starter != "here":
        assert callable(importlib.import_module(f"partool.render.{name}").render)
    if record.starter != "by hand":
        needed = members(ClusterTarget if record.starter == "scheduler" else Target)
        assert needed <= set(dir(importlib.import_module(f"partool.launch.{name}.target").TARGET))
    if record.starter == "scheduler":
        assert callable(importlib.import_module(f"partool.launch.{name}.doctor").checks)
    assert has_test(record.test)
    assert any(line.startswith(f"| `{name}` |") for line in page("launch.md").splitlines())
    assert record.words


def members(protocol: type) -> set[str]:
    """Return the names of a protocol's own and inherited methods."""
    return {name for each in protocol.__mro__ for name in vars(each) if not name.startswith("_")}


def test_a_section_of_launch_is_a_target() -> None:
    sections = [name for name, field in LaunchSpec.model_fields.items() if isinstance(field.default, Section)]
    assert sections == list(SECTIONS), "fields of LaunchSpec stand in the order of the records"


ROOMS = [f"partool/{room}/{name}" for room in ("spec/targets", "render", "launch") for name in TARGETS]


def compared(path: Path) -> list[str]:
    """Return the strings that a file compares values with."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Compare)]
    parts = [part for node in nodes for each in (node.left, *node.comparators) for part in ast.walk(each)]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def test_no_target_is_compared_by_name_outside_of_its_rooms() -> None:
    paths = [path for top in ("partool", "runtime") for path in (ROOT / top).rglob("*.py")]
    outside = [path for path in paths if not str(path.relative_to(ROOT)).startswith(tuple(ROOMS))]
    assert 400 < len(outside) < len(paths)
    naming = [path for path in outside if any(name in path.read_text(encoding="utf-8") for name in TARGETS)]
    assert [path.name for path in naming if set(compared(path)) & set(TARGETS)] == []
    assert "slurm" in compared(ROOT / "partool/launch/slurm/target.py")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_a_kernel_and_is_told(name: str) -> None:
    part = PARTS[name]
    assert (part.place == "update") == (name in OPTIMIZERS)
    assert (part.place != "update") == (name in PUT)
    assert any(line.startswith(f"| `{name}` |") for line in page("kernels.md").splitlines())
    assert has_test(part.test)
    assert part.words


@pytest.mark.parametrize("name", JOB_SCRIPTS)
def test_doctor_looks_at_job_scripts(name: str) -> None:
    """The script's own faults are found even if the scheduler's commands are missing."""
    script = "#!/bin/sh\n#SBATCH --nodes=2\nsrun torchrun --nproc-per-node=8 train.py\n"
    looked = [check for check in doctor(name, None, DoctorFiles(script)) if check.name.startswith("script")]
    assert any(check.verdict == "failed" for check in looked)
    assert not any(check.name.startswith("script") for check in doctor(name, None, DoctorFiles()))


OPEN = ("Schedule", "SequenceMethod", "OptimizerName", "TargetName", "Fused")


def test_names_of_open_sets_come_from_records_alone() -> None:
    """``get_args`` of an annotation of text with names gives the annotation, and not the names."""
    calls = []
    for path in (path for top in ("partool", "runtime", "tests") for path in (ROOT / top).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "get_args" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_args"):
                calls += [ast.unparse(argument) for argument in node.args]
    assert "Recompute" in calls
    assert set(calls) & set(OPEN) == set()


def test_nothing_runs_that_has_no_record() -> None:
    assert ORDERS.keys() == SCHEDULES.keys()
    assert MOMENTS.keys() <= OPTIMIZERS.keys()
    plain = {name for name, one in OPTIMIZERS.items() if not (one.rest or one.norms or one.whole_steps)}
    assert STEPS.keys() == plain
    ranks = sorted(record.preference for record in METHODS.values())
    assert ranks == list(range(len(METHODS))), "preferences are 0, 1, 2 and so on, each once"
    assert len(PREFERENCE) == len(METHODS)


def test_plans_name_only_what_has_a_record() -> None:
    for section, field in ((SequenceLayout, "method"), (OptimizerSpec, "name")):
        with pytest.raises(ValidationError, match="Input should be"):
            section.model_validate_json(f'{{"{field}": "unheard"}}')


def test_the_order_of_preference_is_told() -> None:
    assert ", ".join(f"`{name}`" for name in PREFERENCE) in page("sequence.md")


def test_names_are_an_enum_in_json_schema_and_errors_list_them() -> None:
    adapter: TypeAdapter[str] = TypeAdapter(Annotated[str, OneOf(["a", "b"])])
    assert adapter.json_schema() == {"enum": ["a", "b"], "type": "string"}
    assert adapter.validate_python("a") == "a"
    with pytest.raises(ValidationError, match="Input should be 'a' or 'b'"):
        adapter.validate_python("c")
